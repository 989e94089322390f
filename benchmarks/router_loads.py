"""Records how a trained router loads its experts, for `python -m paper skew`.

Trains the preset qwen3-moe-tiny (32 experts, 4 a token, 4 MoE layers) for a while *without* its load-balancing loss, on
the default text. Then eight sources forward 2048 tokens each of the validation text, and the top-4 of every router's
logits are counted: one matrix (8 sources, 32 experts) a layer and microbatch.

    python benchmarks/router_loads.py --out docs/results/router_loads.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lrmoe.studies.loads import skew_of
from lrmoe.training.documents import read_documents
from lrmoe.training.presets import PRESETS
from lrmoe.training.text import TrainingOrder, tokenize
from lrmoe.training.tokenizer import byte_tokenizer

RANKS, BATCH, SEQ, MICROBATCHES = 8, 16, 128, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order (0)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)

    config = PRESETS["qwen3-moe-tiny"]()
    config.router_aux_loss_coef = 0.0
    config.experts_implementation = "grouped_mm"
    model = AutoModelForCausalLM.from_config(config)
    text = tokenize(read_documents(None), byte_tokenizer(), seq=SEQ)
    order = TrainingOrder(text.train_N, seq=SEQ, length=arguments.steps * BATCH, seed=arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        batch = torch.stack([order[step * BATCH + i]["input_ids"] for i in range(BATCH)])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    matrices = []
    with torch.no_grad():
        for microbatch in range(MICROBATCHES):
            rows = []
            for source in range(RANKS):
                start = (microbatch * RANKS + source) * BATCH * SEQ
                ids = text.validation_N[start : start + BATCH * SEQ].to(torch.int64).view(BATCH, SEQ)
                logits = model(input_ids=ids, output_router_logits=True).router_logits
                chosen = [layer.topk(config.num_experts_per_tok, dim=-1).indices.flatten() for layer in logits]
                rows.append([torch.bincount(ids, minlength=config.num_experts) for ids in chosen])
            matrices += [torch.stack([row[layer] for row in rows]) for layer in range(config.num_hidden_layers)]
    for matrix in matrices:
        print(f"largest over mean rows of a rank: {skew_of(matrix):.2f}")
    # One matrix a line.
    lines = ",\n".join(json.dumps(matrix.tolist()) for matrix in matrices)
    arguments.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(shlex.join(["python", "benchmarks/router_loads.py", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
