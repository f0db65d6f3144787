"""The pictures of docs/distributed.md: which method wins where by the cost model, and what overlaps in a ring.

``python scripts/plot_context_parallel.py [--no-timeline]``: the timeline is run on this machine, with four gloo processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt

from headwise.distributed import costs

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
GPUS = [8 * 2**n for n in range(10)]  # 8 to 4096
NODE = 8  # GPUs that NVLink connects
# A layer of a 70B model: 64 query heads, 8 key heads, bfloat16.
SIZES = costs.Sizes(1, 64, 8, 128, 128, 2)
BETTER = ", if Hopper kernels gave float32 results"
COLOURS = {
    "ring": "#c2571a", f"ring{BETTER}": "#e0a458", "gather": "#2f6f8f", f"gather{BETTER}": "#8fbcd4",
    "ulysses": "#1f5c2e", f"ulysses{BETTER}": "#8cc084",
}  # fmt: skip


def share(name: str, tokens: int, gpus: int) -> float | None:
    """Of the ideal, which is arithmetic alone."""
    method = name.split(",")[0]
    if method == "ulysses" and gpus > SIZES.q_heads:
        return None
    machine = costs.NVLINK if gpus <= NODE else costs.INFINIBAND
    if name.endswith(BETTER):
        machine = machine._replace(unrounded_slowdown=1.0)
    found = costs.of_causal(method, SIZES, tokens, gpus, True)
    ideal = found.flops(SIZES, True) / machine.flops
    return ideal / costs.time_of(method, SIZES, found, machine, True)


def draw_costs() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, title, tokens in (
        (axes[0], "1M tokens in all", lambda gpus: 2**20),
        (axes[1], "16k tokens on each GPU", lambda gpus: 2**14 * gpus),
    ):
        for name, colour in COLOURS.items():
            points = [(gpus, share(name, tokens(gpus), gpus)) for gpus in GPUS]
            known = [(gpus, value) for gpus, value in points if value is not None]
            axis.plot(*zip(*known, strict=True), "o-", color=colour, label=name, markersize=3.5)
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axis.set_title(title)
        axis.set_xlabel("GPUs (NVLink up to 8, InfiniBand above)")
        axis.grid(alpha=0.3)
    axes[0].plot([8], [0.90], "k*", markersize=9, label="published: zigzag ring, dense, 8 H800")
    axes[0].plot([8], [0.76], "k^", markersize=7, label="published: zigzag ring, packed, 8 H800")
    axes[0].set_ylabel("share of ideal (arithmetic alone)")
    axes[0].set_ylim(0, 1.05)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    figure.suptitle("Cost model, causal attention forward and backward: 64 query heads, 8 key heads, bfloat16")
    figure.savefig(FOLDER / "context-parallel-costs.svg")


def draw_timeline(ranks: int = 4) -> None:
    from headwise.benchmark import distributed

    _, timelines = distributed.measure(ranks, 1536, 1)
    colours = {"computing": "#2f6f8f", "waiting": "#c2571a", "sending": "#c9d8c5"}
    figure, axis = plt.subplots(figsize=(11, 3.6))
    begun = min(one["begun"] for one in timelines)
    for rank, one in enumerate(timelines):
        for kind, start, stop in one["events"]:
            base, height = (rank + 0.28, 0.24) if kind == "sending" else (rank - 0.22, 0.44)
            box = ((start - begun) * 1e3, max(stop - start, 1e-5) * 1e3)
            axis.broken_barh([box], (base, height), color=colours[kind])
        axis.plot([(one["middle"] - begun) * 1e3] * 2, [rank - 0.3, rank + 0.52], "k:", linewidth=1)
    for kind, colour in colours.items():
        axis.broken_barh([(0, 0)], (0, 0), color=colour, label={"sending": "messages on their way"}.get(kind, kind))
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.set_xlabel("ms (dotted: forward ends, backward begins)")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axis.set_title(f"A ring of {ranks} gloo processes on two cores of a CPU")
    figure.tight_layout()
    figure.savefig(FOLDER / "context-parallel-timeline.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-timeline", action="store_true")
    options = parser.parse_args()
    matplotlib.use("svg")
    FOLDER.mkdir(exist_ok=True)
    draw_costs()
    if not options.no_timeline:
        draw_timeline()


if __name__ == "__main__":
    main()
