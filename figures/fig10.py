"""Figure 10: longest response and rollout time, step by step, of 32B/32k: baseline against tail batching."""

from statistics import mean

from paper import Table, legend, plt, run, save, seconds, style

STEPS = 20


def main() -> None:
    runs = {
        "synchronous": run("veRL", "32B/32k", STEPS).records,
        "tail batching": run("+ tail batching", "32B/32k", STEPS).records,
    }
    tail = runs["tail batching"]

    def longest(records: list[dict], kind: str) -> float:
        return mean(r["round"]["longest"] for r in records if r["round"]["kind"] == kind)

    table = Table(
        "Figure 10: 32B/32k, a rollout", "tokens, seconds; 1,600 tokens is the middle of the paper's 1.2k to 2k"
    )
    table.add("longest response, short rounds", 1600, longest(tail, "short"))
    table.add("longest response, long rounds", 32_768, longest(tail, "long"))
    table.add("longest response, baseline", 32_768, longest(runs["synchronous"], "long"))
    table.add("rollout seconds, short rounds", 75, seconds(tail, "rollout", "short"))
    table.add("rollout seconds, long rounds", 570, seconds(tail, "rollout", "long"))
    table.add("rollout seconds, baseline", 570, seconds(runs["synchronous"], "rollout"))
    style()
    figure, (left, right) = plt.subplots(1, 2)
    for name, records in runs.items():
        left.plot([r["round"]["longest"] for r in records], label=name, marker=".")
        right.plot([r["seconds"]["rollout"] for r in records], label=name, marker=".")
    left.set(title="Longest trained response", xlabel="step", ylabel="tokens", yscale="log")
    right.set(title="Rollout", xlabel="step", ylabel="seconds", ylim=(0, None))
    left.set_yticks([2**n for n in range(10, 16)], [f"{2**n // 1024}k" for n in range(10, 16)])
    left.minorticks_off()
    legend(figure, left)
    save(figure, "fig10", "Qwen2.5-32B shape, limit 32k, 64 H800")
    table.end("fig10")


if __name__ == "__main__":
    main()
