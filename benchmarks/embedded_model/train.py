"""Training of the embedded model within a budget of wall-clock minutes."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.embedded_model.batches import Mixture, encode
from benchmarks.embedded_model.model import Losses, Model, Shape, export
from benchmarks.embedded_model.sources import KINDS
from pipeline.assets import heldout, model_dir

BALANCE = Shape.router_aux_loss_coef
ROUTER_Z = 1e-3
PIECE = 1024  # tokens that a thread processes at a time
CHECKPOINT_MINUTES = 8.0


@dataclass(frozen=True)
class Plan:
    """Settings of one run."""

    minutes: float
    rate: float  # peak learning rate
    batch_tokens: int
    seed: int = 7
    warmup: float = 0.02  # share of the budget
    weight_decay: float = 0.1
    balance_memory: float = 0.8  # weight of earlier steps in the experts' shares that the balance loss sees
    clip: float = 1.0

    def scale(self, progress: float) -> float:
        """Factor on the learning rate after `progress` (0 to 1) of the budget: warm-up, then cosine."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.01)
        after = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * after))

    def length(self, progress: float) -> int:
        """Tokens of a row: mostly short ones, at last as long as the model's context."""
        return 256 if progress < 0.72 else 512 if progress < 0.9 else 1024


def optimizers(model: Model, plan: Plan) -> list[Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and not name.endswith(("embedding", "gate"))]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    decayed = [p for p in others if p.ndim == 2]
    plain = [p for p in others if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    found: list[Optimizer] = [AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)]
    # `match_rms_adamw` gives updates of AdamW's size, so that both use one learning rate.
    for part in (matrices[0::2], matrices[1::2]):  # two, so that two threads can step them
        decay, adjust = plan.weight_decay, "match_rms_adamw"
        found.append(Muon(part, lr=plan.rate, weight_decay=decay, momentum=0.95, adjust_lr_fn=adjust))
    return found


@torch.no_grad()
def heldout_loss(model: Model, tokenizer: Tokenizer, kind: str, rows: int = 24, length: int = 256) -> float:
    """Nats a token over the first rows of `kind`'s held-out text, for the log and not for the card."""
    text = heldout()[kind].read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids[: rows * length + 1])
    tokens, targets = ids[:-1].view(rows, length), ids[1:].view(rows, length)
    even = torch.full((model.shape.num_hidden_layers, model.shape.num_local_experts), 0.125)
    return float(model.losses(tokens, targets, even).text)


class Run:
    """One training run and its files below `out`."""

    def __init__(self, plan: Plan, corpus: Path, out: Path, threads: int) -> None:
        torch.manual_seed(plan.seed)
        # Threads that take pieces of a batch from a queue lose little when other processes use a core;
        # threads within each product would synchronise thousands of times a step.
        torch.set_num_threads(1)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.plan, self.out = plan, out
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
        if not all((corpus / f"{kind}.npy").exists() for kind in KINDS):
            encode(corpus, self.tokenizer)
        self.mixture = Mixture(corpus, self.tokenizer, plan.seed)
        self.model = Model(Shape())
        self.optimizers = optimizers(self.model, plan)
        self.steps = self.tokens = 0
        self.seconds = 0.0  # of the budget
        layers, experts = self.model.shape.num_hidden_layers, self.model.shape.num_local_experts
        self.shares = torch.full((layers, experts), 1 / experts)  # of recent assignments, per layer
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (out / "model").mkdir(exist_ok=True)
            shutil.copy(model_dir() / name, out / "model" / name)

    def log(self, **values: object) -> None:
        """Append a line to log.jsonl and print it."""
        now = {"minutes": round(self.seconds / 60, 2), "step": self.steps, "tokens": self.tokens}
        line = json.dumps(now | values)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)

    def _piece(self, inputs: Tensor, targets: Tensor, weight: float) -> Losses:
        """Add `weight` times the gradients of some rows; safe to run in several threads."""
        losses = self.model.losses(inputs, targets, self.shares)
        total = weight * (losses.text + BALANCE * losses.balance + ROUTER_Z * losses.router_z)
        total.backward()  # type: ignore[no-untyped-call]
        return losses

    def step(self, progress: float) -> Tensor:
        """One update; returns text and balance loss (2,)."""
        length = self.plan.length(progress)
        rows = PIECE // length
        inputs, targets = map(torch.from_numpy, self.mixture.take(self.plan.batch_tokens // length, length))
        pieces = list(zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True))
        jobs = [self.pool.submit(self._piece, *piece, 1 / len(pieces)) for piece in pieces]
        losses = [job.result() for job in jobs]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.plan.rate * self.plan.scale(progress)
        for done in [self.pool.submit(optimizer.step) for optimizer in self.optimizers]:
            done.result()
        self.model.zero_grad(set_to_none=True)
        counts = torch.stack([loss.counts for loss in losses]).sum(0)
        memory = self.plan.balance_memory
        self.shares = memory * self.shares + (1 - memory) * counts / counts.sum(-1, keepdim=True)
        self.steps += 1
        self.tokens += inputs.numel()
        return torch.stack([torch.stack((loss.text, loss.balance)).detach() for loss in losses]).mean(0)

    def checkpoint(self) -> None:
        """Export the weights and log held-out losses."""
        export(self.model, self.out / "model")
        losses = {kind: round(heldout_loss(self.model, self.tokenizer, kind), 3) for kind in KINDS}
        passes = {kind: round(stream.passes, 3) for kind, stream in self.mixture.streams.items()}
        self.log(heldout=losses, passes=passes)

    def train(self) -> None:
        """Train until the time budget is spent."""
        start, budget, saved = time.monotonic(), self.plan.minutes * 60, 0.0
        recent: list[Tensor] = []
        while self.seconds < budget:
            recent.append(self.step(self.seconds / budget))
            self.seconds = time.monotonic() - start
            if self.steps % 10 == 0:
                text, balance = torch.stack(recent).mean(0).tolist()
                recent.clear()
                smallest = round(float(self.shares.min()), 4)
                self.log(loss=round(text, 4), balance=round(balance, 4), smallest_share=smallest)
            if self.seconds - saved > CHECKPOINT_MINUTES * 60:
                saved = self.seconds
                self.checkpoint()
        self.checkpoint()
        done = {"steps": self.steps, "tokens": self.tokens, "threads": self.threads}
        summary = done | asdict(self.plan)
        (self.out / "run.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line: `python -m benchmarks.embedded_model.train --corpus DIR --minutes 80 --out DIR`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    plan = Plan(args.minutes, args.rate, args.batch_tokens)
    Run(plan, args.corpus, args.out, args.threads).train()


if __name__ == "__main__":
    main()
