"""Plans ten jobs whose authors published how they divided them, and gives each difference a price.

A price is what the step takes longer where one choice is the authors' and the search chooses all others again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.predict import even_strategy
from cost_model.analytic.stacks import find_modules, stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster, parse
from cost_model.cluster.pools import Machines
from whale.ir.strategy import Degrees, ParallelStrategy, count_expert_ranks
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.search_sequence import find_best, search

LLAMA_405B = Transformer(
    layers=126, hidden=16384, heads=128, kv_heads=8, sequence=8192, vocabulary=128256, feed_forward=53248, gated=1,
    untied=1, rotary=1,
)  # fmt: skip


@dataclass(frozen=True)
class PublishedJob:
    """A model, how its authors divided it, and how long a step took.

    Attributes:
        cluster: device type, devices of a host, network type, adapters of a host.
        step_s: measured; or else `tflops`: FLOP/s of a device, of the model's FLOPs (recomputation counted where the
            authors counted it).
        assumed: what is not published, or cannot be described.
    """

    name: str
    source: str
    transformer: Transformer
    degrees: Degrees
    cluster: tuple[str, int, str, int]
    stack: str
    step_s: float = 0.0
    tflops: float = 0.0
    assumed: str = ""

    @property
    def measured_s(self) -> float:
        """Returns the seconds of a step."""
        recompute = self.degrees.recompute if self.degrees.recompute == "full" else "none"
        flops = self.transformer.step_flops(self.degrees.batch, recompute)
        return self.step_s or flops / self.tflops / 1e12 / self.degrees.ranks

    def make_cluster(self) -> Cluster:
        """Returns as many hosts as the job had."""
        device, each, network, nics = self.cluster
        return parse(
            f"name: {self.degrees.ranks} {device}\nnetworks: {{fabric: {{type: {network}}}}}\nhosts:\n"
            f"- {{name: host, count: {-(-self.degrees.ranks // each)}, devices: [{{type: {device}, count: {each}}}],"
            f" networks: {{fabric: {{nics: {nics}}}}}}}\n"
        )


# Of each chunk: the first and the last stage have a layer less than the others (section 3.3.2).
LAYERS_405B = (1, *[2] * 62, 1)

JOBS = (
    PublishedJob(
        "Llama 3 405B, 8k tokens", "Grattafiori et al., 2024, table 4, second row", LLAMA_405B,
        Degrees(
            tensor=8, stages=16, data=128, chunks=4, micro_batch=1, batch=2048, sequence_parallel=True, zero=2,
            stage_layers=LAYERS_405B,
        ),
        ("h100-sxm-80gb", 8, "roce-400", 8), "llama-3", tflops=400,
        assumed="stages of 4 chunks (theirs is not published), the first and the last with a layer less (as theirs)",
    ),
    PublishedJob(
        "Llama 3 405B, 128k tokens", "Grattafiori et al., 2024, table 4, third row",
        msgspec.structs.replace(LLAMA_405B, sequence=131072),
        Degrees(
            tensor=8, stages=16, data=8, context=16, chunks=4, micro_batch=1, batch=128, sequence_parallel=True, zero=2,
            stage_layers=LAYERS_405B,
        ),
        ("h100-sxm-80gb", 8, "roce-400", 8), "llama-3", tflops=380,
        assumed="stages as in the first job; 128 rows (16 million tokens)",
    ),
    PublishedJob(
        "DeepSeek-V3 671B", "DeepSeek-AI, 2024, sections 3.1 and 3.2: 180,000 H800 hours for 10^12 tokens",
        Transformer(
            layers=62, hidden=7168, heads=128, sequence=4096, vocabulary=129280, feed_forward=2048, experts=256, top=8,
            shared_experts=1, head_width=128, latent=512, query_latent=1536, rope_width=64, gated=1, untied=1,
            dense_layers=3, dense_feed_forward=18432, rotary=1, expert_groups=8, top_groups=4, state_bytes=8,
        ),
        Degrees(stages=16, data=128, chunks=2, micro_batch=1, batch=15360, experts=64, zero=1, recompute="selective"),
        ("h800-sxm-80gb", 8, "infiniband-ndr-400", 8), "deepseek-v3",
        step_s=15360 * 4096 * 180e3 * 3600 / 1e12 / 2048,
        assumed="2 chunks stand for DualPipe, which has two copies of the weights; a 62nd layer for the module that "
        "predicts one more token, without its logits",
    ),
    PublishedJob(
        "Mixtral 8x7B", "NVIDIA, Megatron-Core v0.8, moe/README.md",
        Transformer(
            layers=32, hidden=4096, heads=32, kv_heads=8, sequence=4096, vocabulary=32000, feed_forward=14336, gated=1,
            untied=1, experts=8, top=2, rotary=1,
        ),
        Degrees(stages=4, data=16, chunks=8, micro_batch=1, batch=256, experts=8, zero=1),
        ("h100-sxm-80gb", 8, "infiniband-ndr-400", 8), "megatron-core-bf16", tflops=438,
    ),
    PublishedJob(
        "Nemotron-4 340B", "NVIDIA, 2024, table 2, third row",
        Transformer(
            layers=96, hidden=18432, heads=96, kv_heads=8, sequence=4096, vocabulary=256000, feed_forward=73728,
            untied=1, relu=1, rotary=1,
        ),
        Degrees(tensor=8, stages=12, data=64, chunks=8, micro_batch=1, batch=2304, sequence_parallel=True, zero=1),
        ("h100-sxm-80gb", 8, "infiniband-ndr-400", 8), "megatron-core-bf16", step_s=8.0,
    ),
    PublishedJob(
        "MegaScale 175B", "Jiang et al., NSDI 2024, table 2, last row",
        Transformer(layers=96, hidden=12288, heads=128, sequence=2048, vocabulary=64000),
        Degrees(tensor=8, stages=8, data=192, chunks=6, micro_batch=1, batch=6144, sequence_parallel=True, zero=1),
        ("a100-sxm-80gb", 8, "infiniband-hdr-200", 8), "megatron-core-bf16", step_s=6.34,
        assumed="attention and network one after the other (theirs are beside each other), a micro-batch of 1",
    ),
    PublishedJob(
        "MT-NLG 530B", "Smith et al., 2022, section 2.3",
        Transformer(layers=105, hidden=20480, heads=128, sequence=2048, vocabulary=51200),
        Degrees(tensor=8, stages=35, data=8, micro_batch=1, batch=1920, recompute="full"),
        ("a100-sxm-80gb", 8, "infiniband-hdr-200", 8), "deepspeed-2022", step_s=60.1,
    ),
    PublishedJob(
        "BLOOM 176B", "BigScience, train/tr11-176B-ml/README.md: 150 TFLOP/s",
        Transformer(layers=70, hidden=14336, heads=112, sequence=2048, vocabulary=250880),
        Degrees(tensor=4, stages=12, data=8, micro_batch=2, batch=2048, recompute="full", zero=1),
        ("a100-sxm-80gb", 8, "omni-path-100", 4), "deepspeed-2022", tflops=150,
    ),
    PublishedJob(
        "GPT 1,008B", "Narayanan et al., SC 2021, table 1, last row",
        Transformer(layers=128, hidden=25600, heads=160, sequence=2048, vocabulary=51200),
        Degrees(tensor=8, stages=64, data=6, micro_batch=1, batch=3072, recompute="full"),
        ("a100-sxm-80gb", 8, "infiniband-hdr-200", 8), "megatron-2021", tflops=163,
        assumed="stages without chunks",
    ),
    PublishedJob(
        "GLM-130B", "Zeng et al., ICLR 2023, section 3: 135 TFLOP/s",
        Transformer(layers=70, hidden=12288, heads=96, sequence=2048, vocabulary=150528, feed_forward=32768, gated=1),
        Degrees(tensor=4, stages=8, data=24, micro_batch=1, batch=4224, recompute="full", zero=1),
        ("a100-sxm-40gb", 8, "infiniband-hdr-200", 8), "deepspeed-2022", tflops=135,
        assumed="a micro-batch of 1",
    ),
)  # fmt: skip

# What both say: a name of `Constraints`, the authors' value, and all values that the plan has.
Choice = tuple[str, object, set[object]]


def list_choices(degrees: Degrees, strategy: ParallelStrategy, experts: int) -> Iterator[Choice]:
    """Yields the choices in which a strategy is not as the authors' degrees."""
    stages = strategy.stages
    parts = [part for stage in stages for part in stage.parts]
    found: list[Choice] = [
        ("tensor", degrees.tensor, {part.tensor for part in parts}),
        ("stages", degrees.stages, {len(stages)}),
        ("data", degrees.data, {stage.replicas // strategy.context for stage in stages}),
        ("chunks", degrees.chunks, {strategy.chunks}),
        ("micro_batch", degrees.micro_batch, {part.rows for part in parts}),
        ("context", degrees.context, {strategy.context}),
        ("zero", degrees.zero, {strategy.zero}),
        ("recompute", degrees.recompute, set(strategy.recomputes)),
    ]
    if experts:
        ways: set[object] = {strategy.expert_ranks or count_expert_ranks(experts, stage.replicas) for stage in stages}
        found.append(("experts", degrees.experts, ways))
    yield from (one for one in found if one[2] != {one[1]})


@dataclass(frozen=True)
class Compared:
    """A job as its authors divided it and as it is planned, with the price of each difference; infinite: none fits."""

    job: PublishedJob
    theirs: Evaluation
    strategy: ParallelStrategy
    ours: Evaluation
    prices: tuple[tuple[str, object, set[object], float], ...]


def compare(job: PublishedJob, budget_s: float, each_s: float) -> Compared:
    """Plans a job, evaluates its authors' division, and prices what differs."""
    machines, t = Machines(job.make_cluster()), job.transformer
    software = stack(job.stack)
    if job.degrees.selective:
        software = msgspec.structs.replace(software, selective=find_modules(job.degrees.selective))
    model = TransformerModel(t, software, machines)
    theirs = evaluate(model, machines, even_strategy(t.layers, job.degrees, machines, model.stack.dtype, t.experts > 0))
    found = search(model, machines, job.degrees.batch, Constraints(budget_s=budget_s))
    prices = []
    for name, value, own in list_choices(job.degrees, found.strategy, t.experts):
        limits = replace(Constraints(budget_s=each_s), **{name: value})  # type: ignore[arg-type]
        other = find_best(model, machines, job.degrees.batch, limits)
        step_s = float("inf") if other is None else other.evaluation.step_s
        prices.append((name, value, own, step_s / found.evaluation.step_s - 1))
    return Compared(job, theirs, found.strategy, found.evaluation, tuple(prices))


def _line(one: Compared) -> str:
    job, d = one.job, one.job.degrees
    theirs = f"{d.stages} x {d.data} x {d.tensor}"
    theirs += f" x {d.context} context" if d.context > 1 else ""
    theirs += f", {d.chunks} chunks" if d.chunks > 1 else ""
    theirs += f", experts over {d.experts}" if d.experts > 1 else ""
    fits = "" if one.theirs.fits else f", lacks {one.theirs.lacking_bytes / 2**30:.1f} GiB"
    return (
        f"| {job.name} | {d.ranks:,} {job.cluster[0]} | {theirs} | {job.measured_s:.2f} | "
        f"{one.theirs.step_s:.2f}{fits} | {one.strategy.format_summary()} | {one.ours.step_s:.2f} | "
        f"{one.theirs.step_s / one.ours.step_s - 1:+.0%} |"
    )


def _parts(found: Evaluation) -> str:
    return (
        f"{found.compute_s:.2f} kernels, {found.send_s:.2f} sends, {found.bubble_s:.2f} bubble, "
        f"{found.reduce_s:.2f} sums, {found.update_s:.2f} update"
    )


def _price(name: str, value: object, own: set[object], price: float) -> str:
    planned = " and ".join(map(str, sorted(own, key=str)))
    cost = "nothing fits" if price == float("inf") else f"{price:+.1%}"
    return f"{name} {value} for {planned}: {cost}"


def format_table(found: list[Compared]) -> str:
    """Formats the table of all jobs, then the parts and the prices of each."""
    lines = [
        "| job | devices | authors' stages x data x tensor | published s | predicted s | planned | s | longer by |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, found),
        "",
    ]
    for one in found:
        lines += [
            f"**{one.job.name}** ({one.job.source}"
            + (f"; {one.job.assumed}" if one.job.assumed else "")
            + f"; `{one.job.stack}`).",
            f"Authors' step: {_parts(one.theirs)}. Planned: {_parts(one.ours)}.",
            "Prices of the authors' choices, one at a time: "
            + ("; ".join(_price(*price) for price in one.prices) or "the plan has them all")
            + ".",
            "",
        ]
    return "\n".join(lines)


BEGINS = "<!-- written by `python -m benchmarks.planner published-jobs --out docs` -->\n"


def published_jobs(options: argparse.Namespace) -> None:
    """Prints the table, or writes it into the page `published_jobs.md` of a folder."""
    chosen = [job for number, job in enumerate(JOBS) if not options.jobs or number in options.jobs]
    found = []
    for job in chosen:
        found.append(compare(job, options.budget, options.each))
        print(_line(found[-1]), *(_price(*price) for price in found[-1].prices), sep="\n  ", flush=True)
    if options.out is not None:
        path = Path(options.out, "published_jobs.md")
        path.write_text(path.read_text().partition(BEGINS)[0] + BEGINS + "\n" + format_table(found))
