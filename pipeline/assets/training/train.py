"""Training of the embedded model within a budget of wall-clock minutes."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from pipeline.assets.training.batches import Mixture, encode
from pipeline.assets.training.model import Model, Shape, export
from pipeline.assets.training.sources import KINDS

ASSETS = Path(__file__).parent.parent
BALANCE = Shape.router_aux_loss_coef
ROUTER_Z = 1e-3
CHECKPOINT_MINUTES = 8.0


@dataclass(frozen=True)
class Plan:
    """Settings of one run."""

    minutes: float
    optimizer: str
    rate: float  # peak learning rate
    batch_tokens: int
    seed: int = 7
    warmup: float = 0.02  # share of the budget
    weight_decay: float = 0.1
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
    """AdamW for everything, or Muon for the hidden matrices and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and not name.endswith(("embedding", "gate"))]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    decayed = [p for p in others if p.ndim == 2]
    plain = [p for p in others if p.ndim == 1]
    if plan.optimizer == "adamw":
        decayed += matrices
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    found: list[Optimizer] = [AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)]
    if plan.optimizer == "muon":
        # The update's size then equals AdamW's, so that one learning rate serves both.
        decay, adjust = plan.weight_decay, "match_rms_adamw"
        found.append(Muon(matrices, lr=plan.rate, weight_decay=decay, momentum=0.95, adjust_lr_fn=adjust))
    return found


@torch.no_grad()
def heldout_loss(model: Model, tokenizer: Tokenizer, kind: str, rows: int = 24, length: int = 256) -> float:
    """Nats a token over the first rows of `kind`'s held-out text: to watch training by, not for the card."""
    text = (ASSETS / "heldout" / f"{kind}.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids[: rows * length + 1])
    tokens, targets = ids[:-1].view(rows, length), ids[1:].view(rows, length)
    with torch.autocast("cpu", torch.bfloat16):
        return float(model.losses(tokens, targets).text)


class Run:
    """One training run and its files below `out`."""

    def __init__(self, plan: Plan, corpus: Path, out: Path) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.out = plan, out
        out.mkdir(parents=True, exist_ok=True)
        tokenizer_file = ASSETS / "model" / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        if not all((corpus / f"{kind}.npy").exists() for kind in KINDS):
            encode(corpus, self.tokenizer)
        self.mixture = Mixture(corpus, self.tokenizer, plan.seed)
        self.model = Model(Shape())
        self.optimizers = optimizers(self.model, plan)
        self.steps = self.tokens = 0
        self.seconds = 0.0  # of the budget
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (out / "model").mkdir(exist_ok=True)
            shutil.copy(ASSETS / "model" / name, out / "model" / name)

    def log(self, **values: object) -> None:
        """Append a line to log.jsonl and print it."""
        now = {"minutes": round(self.seconds / 60, 2), "step": self.steps, "tokens": self.tokens}
        line = json.dumps(now | values)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)

    def step(self, progress: float) -> tuple[Tensor, Tensor]:
        """One update; returns text and balance loss."""
        length = self.plan.length(progress)
        inputs, targets = map(torch.from_numpy, self.mixture.take(self.plan.batch_tokens // length, length))
        with torch.autocast("cpu", torch.bfloat16):
            losses = self.model.losses(inputs, targets)
        (losses.text + BALANCE * losses.balance + ROUTER_Z * losses.router_z).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.plan.rate * self.plan.scale(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += inputs.numel()
        return losses.text.detach(), losses.balance.detach()

    def checkpoint(self) -> None:
        """Export the weights, log held-out losses, and take the kinds' weights of mixture.json, if any."""
        export(self.model, self.out / "model")
        export(self.model, self.out / "float32", torch.float32)
        heldout = {kind: round(heldout_loss(self.model, self.tokenizer, kind), 3) for kind in KINDS}
        passes = {kind: stream.passes for kind, stream in self.mixture.streams.items()}
        self.log(heldout=heldout, passes=passes, weights=self.mixture.weights)
        wanted = self.out / "mixture.json"
        if wanted.exists():
            self.mixture.weights = {kind: float(json.loads(wanted.read_text())[kind]) for kind in KINDS}

    def train(self) -> None:
        """Train until the budget is spent, however many steps that allows."""
        start, budget, saved = time.monotonic(), self.plan.minutes * 60, 0.0
        recent: list[tuple[Tensor, Tensor]] = []
        while self.seconds < budget:
            recent.append(self.step(self.seconds / budget))
            self.seconds = time.monotonic() - start
            if self.steps % 20 == 0:
                text, balance = (float(torch.stack(values).mean()) for values in zip(*recent, strict=True))
                recent.clear()
                self.log(loss=round(text, 4), balance=round(balance, 4))
            if self.seconds - saved > CHECKPOINT_MINUTES * 60:
                saved = self.seconds
                self.checkpoint()
        self.checkpoint()
        done = {"steps": self.steps, "tokens": self.tokens, "threads": torch.get_num_threads()}
        summary = done | asdict(self.plan)
        (self.out / "run.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line: `python -m pipeline.assets.training.train --corpus DIR --minutes 80 --out DIR`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Run(Plan(args.minutes, args.optimizer, args.rate, args.batch_tokens), args.corpus, args.out).train()


if __name__ == "__main__":
    main()
