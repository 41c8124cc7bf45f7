"""torchtitan's MoE layer on the bench's data, for comparison; imported only where torchtitan is installed (written for 0.3)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from runtime.kernels.bench_layer import Form, LayerData


def torchtitan_form(data: LayerData) -> Form:
    """Its layer without expert parallelism: router (softmax, weights renormalised), local dispatcher, grouped experts; the
    same weights. It keeps each expert matrix transposed, and multiplies in bf16 whatever the input."""
    moe, linear = import_module("torchtitan.models.common.moe"), import_module("torchtitan.models.common.linear")
    dispatcher = import_module("torchtitan.models.common.token_dispatcher")
    layer = data.layer
    module = moe.MoE.Config(
        num_experts=layer.experts,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=layer.hidden, hidden_dim=layer.ffn, num_experts=layer.experts),
            token_dispatcher=dispatcher.LocalTokenDispatcher.Config(num_experts=layer.experts, top_k=layer.top_k),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=layer.experts,
            gate=linear.Linear.Config(in_features=layer.hidden, out_features=layer.experts),
            top_k=layer.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        load_balance_coeff=None,
    ).build()
    module.to(device=data.x.device)
    experts = module.routed_experts.inner_experts
    pairs: tuple[tuple[Any, Tensor], ...] = (
        (module.router.gate.weight, data.gate.T),
        (experts.w1_EFD, data.w_gate.mT),
        (experts.w3_EFD, data.w_up.mT),
        (experts.w2_EDF, data.w_down.mT),
    )
    for parameter, values in pairs:
        parameter.data = values.detach().contiguous()

    def forward() -> Tensor:
        y: Tensor = module(data.x[None])[0]
        return y

    return Form(forward=forward, leaves=(data.x, *(parameter for parameter, _ in pairs)))
