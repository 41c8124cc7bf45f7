"""Ctrl-C and SIGTERM: what was found is kept, and commands end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from cli_cases import Call, Inputs
from numba.core.registry import cpu_target

from hybridep.commands.interrupts import hurried_by_interrupts, terminate
from hybridep.commands.plan_progress import PlanProgress
from hybridep.compiled import compiled
from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan, load_any_plan
from hybridep.plan import Plan
from planner.clock import elapsed_s, now_s


def test_a_second_sigterm_does_not_end_the_way_out() -> None:
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


@pytest.mark.turns(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_ends_all_searches_with_the_best_so_far(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    seen, later_s = list[str](), list[float]()

    def interrupt(_: PlanProgress, what: str, seconds: float) -> None:
        seen.append(what)
        if seen.count("plan") == 2 and what == "plan":
            signal.raise_signal(number)

    def without(*_: object) -> Plan:
        began_s = now_s()
        time.sleep(0.01)
        later_s.append(now_s() - began_s)
        raise InfeasibleError("not asked for")

    monkeypatch.setattr(PlanProgress, "__call__", interrupt)
    monkeypatch.setattr("hybridep.commands.sites_choice.in_one", without)
    path = inputs.folder / "stages.yaml"
    result = call("plan", "dtfm-10", "gpt-large", "--stages", "auto", "--time-limit", "1000", "-o", path)
    # The search for pipelines ends, and what would be looked for next has no time.
    assert result.code == 0 and seen.count("plan") >= 2 and later_s[0] > 1000, result.err
    plan = load_any_plan(path)
    # What it took is told as it was.
    assert isinstance(plan, PipelinePlan) and plan.solver is not None and plan.solver.solve < 100


def test_after_an_interrupt_time_limits_are_over() -> None:
    with hurried_by_interrupts():
        first_s, began_s = elapsed_s(), now_s()
        time.sleep(0.01)
        assert now_s() - began_s < 10
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        began_s = now_s()
        time.sleep(0.01)
        assert now_s() - began_s > 1000
        # What is reported is what passed.
        assert 0.02 <= elapsed_s() - first_s < 10
    began_s = now_s()
    assert now_s() - began_s < 10 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with hurried_by_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            began_s = now_s()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            time.sleep(0.01)
            assert now_s() - began_s > 1000
    finally:
        signal.signal(signal.SIGINT, before)


def half(number: float) -> float:
    return number / 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_what_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals) -> None:
    """Where LLVM hands over a function's code, an exception would be lost, and the code with it."""
    engine = cpu_target.target_context.codegen()._engine._ee
    keep = engine._object_cache_notify

    def interrupted(module: object, code: bytes) -> None:
        signal.raise_signal(number)
        keep(module, code)

    monkeypatch.setattr(engine, "_object_cache_notify", interrupted)
    monkeypatch.setattr("hybridep.compiled._cache_folder", lambda package: str(tmp_path))
    function = compiled(half)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            function(3.0)
        assert function(3.0) == 1.5
        # On the way out no second one ends it.
        assert number == signal.SIGINT or signal.getsignal(number) is not terminate
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_before_there_is_a_plan_ends_the_command() -> None:
    with pytest.raises(SystemExit) as ended, hurried_by_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_sigterm_while_a_plan_is_explained_leaves_it_written(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inputs.folder / "plan.yaml"
    monkeypatch.setattr("planner.explain", lambda *_: signal.raise_signal(signal.SIGTERM))
    result = call("plan", inputs.cluster, inputs.workload, "-o", path)
    assert result.code == 143 and f"interrupted; plan written to {path}" in result.err and load_any_plan(path)
