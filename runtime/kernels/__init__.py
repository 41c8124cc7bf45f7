"""Dispatch inside a fast domain: CUDA kernels beside the plain torch functions that say what they compute.

Importing this package neither compiles anything nor touches a device.
"""
