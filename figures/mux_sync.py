"""RollMux, section 6: seconds of the weights' way between two pools, flat and in parts."""

from paper import MODELS, Table, command, legend, note, pair, plt, save, style

from simulate import load_model_file
from simulation.costs import BYTES
from simulation.mux_sync import Links

GPUS = (8, 16)  # of each pool
PAPER = {
    ("flat", 8): (7.5, 13.8, 30.7),
    ("in parts", 8): (0.9, 1.7, 3.9),
    ("flat", 16): (8.2, 15.2, 33.8),
    ("in parts", 16): (3.1, 5.8, 12.3),
}
SIZES = {model.partition("/")[0]: load_model_file(name).shape.parameters * BYTES for model, name in MODELS.items()}


def main() -> None:
    links = Links()
    table = Table("RollMux, weight sync: 7B, 14B and 32B between pools of 8 and 16 GPUs", "seconds")
    computed = {
        (way, gpus): [
            links.flat(size) if way == "flat" else links.in_parts(size, gpus, gpus) for size in SIZES.values()
        ]
        for way, gpus in PAPER
    }
    for (way, gpus), seconds in PAPER.items():
        for model, paper, ours in zip(SIZES, seconds, computed[way, gpus], strict=True):
            table.add(f"{model}, {gpus} -> {gpus} GPUs, {way}", paper, ours)
    overlapped = [links.in_parts(size, 16, 16, overlaps=True) for size in SIZES.values()]
    saved = max(1 - ours / whole for ours, whole in zip(overlapped, computed["in parts", 16], strict=True))
    note(
        f"Two rates are fitted to these twelve numbers. A connection between the pools carries {links.stream / 1e9:g} "
        "GB/s, 85 % of 20 Gbit/s: it explains all of 8 GPUs. Among nodes of a pool a broadcast makes "
        f"{links.among_nodes / 1e9:g} GB/s, of a network that the paper does not give: it explains parts on 16 GPUs, "
        "but not why flat is a tenth slower there than on 8. Where pieces are broadcast while the next ones cross, as "
        f"they are in overlap/weights.py, 16 GPUs need up to {saved:.0%} less."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, gpus in zip(axes, GPUS, strict=True):
        ways = [way for way, count in PAPER if count == gpus]
        labels = [f"{model} {way}" for way in ways for model in SIZES]
        pair(axis, *(sum(([*values[way, gpus]] for way in ways), []) for values in (PAPER, computed)), labels)
        axis.set(title=f"{gpus} -> {gpus} GPUs", ylabel="seconds")
    legend(figure, axes[0])
    save(figure, "mux_sync", "time model, two rates fitted", "arXiv 2512.11306")
    speedups = [flat / parts for flat, parts in zip(computed["flat", 8], computed["in parts", 8], strict=True)]
    table.end("mux_sync", speedup_8=round(max(speedups), 1), saved_by_overlap=round(saved, 3))


if __name__ == "__main__":
    command(main, __doc__)
