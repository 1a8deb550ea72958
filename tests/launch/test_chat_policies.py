"""What the chat says about policies, and about the fidelity of an answer."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from launch.chat.conversation import Reply
from launch.chat.tables import policy_list, policy_options, summary
from launch.errors import WrongUsage
from pipeline.policies.presets import PRESETS
from protocol.messages import Done


def lines(what: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_list_of_policies_has_a_line_for_each() -> None:
    shown = lines(policy_list("dali", {"window": "4"}))
    assert [line.split()[0] for line in shown[: len(PRESETS)]] == [
        "*" if name == "dali" else name for name in PRESETS
    ]
    assert "in use: dali window=4" in shown
    for approximate in ("daop", "adapmoe"):
        assert any(f" {approximate} " in line and "(approximate)" in line for line in shown)


def test_options_of_a_policy_have_the_values_in_force() -> None:
    shown = {line.split()[0] for line in lines(policy_options("adapmoe", {"gate": "own"})) if line.strip()}
    assert {"gate=own", "prediction=lookahead", "sizes=dp"} <= shown
    assert not any(word.startswith("threshold=") for word in shown)  # an option of the exchanged gate
    assert {"seed=the", "churn=1"} <= {
        line.split()[0] for line in lines(policy_options("random", {"churn": "1"}))
    }
    with pytest.raises(WrongUsage, match="did you mean fiddler"):
        policy_options("fidler", {})


@pytest.mark.parametrize(
    ("fidelity", "expected"),
    [
        ({"exact": True}, ""),
        ({"exact": False, "skipped": 0.0312, "substituted": 0.0}, "approximate: 3.1% skipped"),
        ({"exact": False, "skipped": 0.01, "predicted": 0.5}, "approximate: 1.0% skipped, 50.0% predicted"),
        ({"exact": False, "skipped": 0.0}, "approximate: all computed as routed"),
    ],
)
def test_summary_says_how_far_an_answer_is_approximate(fidelity: dict[str, object], expected: str) -> None:
    reply = Reply("text", 3, 0.1, Done(0, "stop", stats={"fidelity": fidelity}))
    parts = summary(reply, "", 10)
    assert [part for part in parts if "approximate" in part] == ([expected] if expected else [])
