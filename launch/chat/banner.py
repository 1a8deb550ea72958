"""What a chat says before the first question."""

from __future__ import annotations

from launch.terminal.format import model_name
from pipeline.assets import model_dir
from protocol.messages import Welcome

QUESTIONS = (  # that the embedded model answers well, also without a repetition penalty
    "What is the global interpreter lock?",
    "What is a generator?",
    "What is a virtual machine?",
)


def banner(welcome: Welcome, system: str | None) -> list[str]:
    lines = [f"{model_name(welcome.model)} on {welcome.device}, policy {welcome.policy}"]
    if not welcome.exact:
        lines[0] += " (approximate)"
    if welcome.model == str(model_dir()):
        lines.append("It is for trying the engine, and knows little. Three questions that it answers well:")
        lines += [f"  {question}" for question in QUESTIONS]
    if welcome.emulation:
        lines.append(f"emulated: {welcome.emulation}")
    if system is not None:
        lines.append(f"system message: {system}")
    return lines
