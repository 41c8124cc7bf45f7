"""Codecs as the training runtime uses them: what travels on a level's links in place of exact numbers.

The formats are those of ``runtime.kernels`` (its references in plain torch, its kernels on a GPU); their bytes are counted by
``hybridep.codecs``. Here they are put into messages, together with what both ends must keep between steps.
"""

from runtime.codecs.experts import ExpertCoder, expert_coder
from runtime.codecs.gradients import GradientCoder, gradient_coder
from runtime.codecs.rows import RowCoder, row_coder

__all__ = ["ExpertCoder", "GradientCoder", "RowCoder", "expert_coder", "gradient_coder", "row_coder"]
