"""Defines the configuration keys in nine sections, each key with its type, default, allowed values and meaning.

Decision: 0141.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whale.config.values import Mesh

# Section -> what its keys are about, in the order of the documentation's page. A key's first word is its section.
SECTIONS = {
    "mesh": "How a step is laid out over the ranks: by hand, by a plan file, or by a search.",
    "batch": "How the rows of a batch, and what depends on them, are divided and read.",
    "memory": "What a rank keeps in its memory during a step.",
    "precision": "The types that a step computes in.",
    "pipeline": "Micro-batches, and the stages of a pipeline.",
    "communication": "How ranks exchange tensors.",
    "kernels": "What is computed by kernels of Whale instead of TensorFlow's.",
    "fault": "What happens when a rank fails, is slow, or is to end.",
    "debug": "What is logged, dumped, traced, compared and emulated.",
}


@dataclass(frozen=True, slots=True)
class Key:
    """Describes one configuration key.

    Attributes:
        name: section and name within it, e.g. `memory.zero`; or a section alone.
        type: "bool", "int", "float", "str", "list[int]", "list[str]" or "mesh".
        default: value if no source sets the key.
        help: meaning of the key, in messages and on the documentation's page.
        choices: values that the key, or each element of a list, may have; (): any.
        minimum, maximum: bounds of the value, or of each element of a list; None: no bound.
    """

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def variable(self) -> str:
        """Returns the environment variable that sets this key, e.g. `WHALE_MEMORY_ZERO`."""
        return "WHALE_" + self.name.upper().replace(".", "_")

    @property
    def section(self) -> str:
        """Returns the section of this key, e.g. `memory`."""
        return self.name.partition(".")[0]


KERNELS = ("updates", "elementwise", "convolutions", "products", "einsums", "padding", "nn", "loops", "xla")

KEYS: tuple[Key, ...] = (
    Key(
        "mesh",
        "mesh",
        Mesh(),
        "named axes of the ranks and their sizes, outermost first: wh.Mesh(stage=2, data=2, tensor=2), as text "
        "stage=2,data=2,tensor=2; remaining ranks form an axis that the program names, else data; "
        "empty = one axis",
    ),
    Key(
        "mesh.annotations",
        "str",
        "",
        "JSON file with scopes by names of layers and variables, as wh.annotate takes them; empty = none",
    ),
    Key(
        "mesh.auto_parallel",
        "bool",
        False,
        "the first training step is distributed in the way that is predicted to be the fastest; scopes are kept",
    ),
    Key(
        "mesh.plan",
        "str",
        "",
        "file that `whale plan -o FILE script` wrote: that script's step runs under it; empty = plans are made",
    ),
    Key(
        "mesh.plan_cache",
        "str",
        "auto",
        "folder in which plans, lowered steps and GPU kernels are kept for later runs; auto = whale in "
        "XDG_CACHE_HOME or ~/.cache; empty = they are not kept",
    ),
    Key(
        "mesh.profile",
        "str",
        "",
        "file that `whale profile` wrote on this machine, by which auto_parallel predicts; empty: a quick measurement",
    ),
    Key(
        "mesh.rank_order",
        "str",
        "links",
        "how ranks of several hosts are laid on the mesh: by the links between the hosts, groups that divide tensors "
        "within hosts; or by their numbers",
        choices=("links", "numbers"),
    ),
    Key(
        "batch.mode",
        "str",
        "global",
        "what each rank passes to a step or feeds: the whole batch, or a local one of its own, in order of ranks",
        choices=("global", "local"),
    ),
    Key("batch.inputs", "list[str]", (), "names of the inputs whose dimension 0 is the batch; empty = found by size"),
    Key(
        "batch.shares",
        "list[int]",
        (),
        "rows of the global batch for each rank, or for each coordinate of the axis data; ranks that read the same rows"
        " get the sum of theirs; batches of another size in proportion; empty = as equal as possible",
        minimum=0,
    ),
    Key(
        "batch.norm_statistics",
        "str",
        "rank",
        "rows whose mean and variance batch normalisation uses: rank: each rank's own; batch: those of the whole "
        "batch, as on one device; micro-batch: each rank's rows of a micro-batch. With micro-batches, programs with "
        "batch normalisation are refused unless it is micro-batch",
        choices=("rank", "batch", "micro-batch"),
    ),
    Key(
        "batch.random",
        "str",
        "local",
        "local: each rank draws the random rows that it holds; global: every rank draws what one device would",
        choices=("local", "global"),
    ),
    Key("batch.prefetch", "int", 2, "batches that a wh.shard dataset reads ahead of the step", minimum=1),
    Key(
        "memory.limit_bytes",
        "int",
        0,
        "memory that each rank's device has for a step; one that is predicted to take more is refused; 0 = the "
        "host's memory, or the smallest GPU's, divided by its ranks",
        minimum=0,
    ),
    Key(
        "memory.zero",
        "int",
        0,
        "ZeRO level: 1 or 2: the optimizer's state is sharded over the ranks; 3: weights too, gathered at use; 0:"
        " all of it is replicated",
        minimum=0,
        maximum=3,
    ),
    Key("memory.zero_min_bytes", "int", 1 << 16, "variables below that size stay replicated under ZeRO", minimum=0),
    Key("memory.zero_prefetch", "int", 1, "weights that are gathered while another is used, with ZeRO 3", minimum=0),
    Key(
        "memory.recompute",
        "str",
        "",
        "activation (gradient) checkpointing: activations that are kept for the backward pass, which recomputes "
        "the others: marked: those that the program marks; stage: those that go from stage to stage; auto: some, "
        "chosen by bytes; empty = all",
        choices=("", "marked", "auto", "stage"),
    ),
    Key(
        "memory.attention_scores_bytes",
        "int",
        64 << 20,
        "attention with more bytes of scores on a rank is computed in up to 16 blocks of queries, and again for "
        "the backward pass: less memory, more time; on GPUs a 256th of the smallest one's memory, if this is not set "
        "and that is more; 0 = as it is written",
        minimum=0,
    ),
    Key(
        "memory.offload",
        "str",
        "",
        "what stays in host memory while an accelerator computes: optimizer: the optimizer's state, and updates "
        "are computed there; parameters: weights as well, copied at use; tables: what is looked up by rows alone,"
        " with its state, and only these rows are copied; empty = nothing",
        choices=("", "optimizer", "parameters", "tables"),
    ),
    Key(
        "precision.compute_dtype",
        "str",
        "",
        "mixed precision (AMP): matmuls and convolutions of float32 are computed in this type; with float16 "
        "losses are scaled, and a step whose gradients overflow is skipped; empty = as the program says",
        choices=("", "bfloat16", "float16"),
    ),
    Key(
        "precision.loss_scale",
        "float",
        0.0,
        "what losses are multiplied by, with float16, and what is halved when gradients overflow; 0 = 32768 at "
        "first, and twice as much after every 2000 steps without overflow",
        minimum=0.0,
    ),
    Key(
        "pipeline.micro_batches",
        "int",
        1,
        "into how many parts each rank cuts its rows of a batch; gradients are summed over them before the update",
        minimum=1,
    ),
    Key(
        "pipeline.stages",
        "int",
        0,
        "with auto_parallel: so many stages; 0: as many as are fastest, or none",
        minimum=0,
    ),
    Key(
        "pipeline.schedule",
        "str",
        "1f1b",
        "order in which the stages of a pipeline compute their micro-batches",
        choices=("gpipe", "1f1b", "zb-h1"),
    ),
    Key(
        "communication.in_process_ranks",
        "int",
        0,
        "number of ranks that are threads of this one process; 0 = each rank is a process that a launcher started",
        minimum=0,
    ),
    Key(
        "communication.shared_memory",
        "str",
        "tensors",
        "what ranks of one machine share: tensors: memory for messages, and large tensors in memory that all of them "
        "can read, if wh.init comes before the first tensor; messages: only memory for messages; none: they exchange "
        "through MPI, as machines do",
        choices=("tensors", "messages", "none"),
    ),
    Key(
        "communication.between_hosts",
        "str",
        "auto",
        "what carries messages between hosts: tcp: connections of Whale's own; mpi: MPI; auto: both are timed when the "
        "ranks connect, and the faster one is used",
        choices=("auto", "tcp", "mpi"),
    ),
    Key(
        "communication.backend",
        "str",
        "whale",
        "who exchanges tensors: horovod sums gradients; nccl, cuda-ipc, pinned connect GPUs; all else is Whale's own",
        choices=("whale", "horovod", "nccl", "cuda-ipc", "pinned"),
    ),
    Key(
        "communication.bucket_bytes",
        "int",
        4 << 20,
        "size in bytes up to which small tensors travel together in one all-reduce, or all-gather of gradients; of "
        "nccl 32 MiB unless it is set",
        minimum=0,
    ),
    Key(
        "communication.algorithm",
        "str",
        "auto",
        "algorithm of all-reduces, where it can be used; auto: what takes least time by size, ranks and link",
        choices=("auto", "direct", "pairwise", "ring", "halving-doubling", "tree", "hierarchical", "leader"),
    ),
    Key(
        "communication.wire_dtype",
        "str",
        "",
        "float32 gradients are rounded to this type before they travel, and added in float32; empty = sent as they are",
        choices=("", "float16", "bfloat16"),
    ),
    Key(
        "kernels",
        "list[str]",
        KERNELS,
        "what CPUs compute by kernels of Whale, or as fewer and larger, fused operations, except what measured slower "
        "on the machine. With the same results: updates: optimizers' arithmetic, and rows added to tables. With the "
        "same results up to rounding: elementwise: other arithmetic on elements; convolutions: small ones, as products "
        "of matrices; products: batches with one matrix in common, as one; einsums: batches of small products; "
        "padding: products that oneDNN's AVX2 code is slow at; nn: losses of numbered classes and gradients of "
        "depthwise filters; loops: recurrent layers and other loops of known length, by few operations; xla: functions "
        "with jit_compile=True, in clusters between exchanges, by XLA, on GPUs too; empty = nothing",
        choices=KERNELS,
    ),
    Key(
        "fault.elastic",
        "str",
        "",
        "ranks go on in their processes when others are killed, frozen or lost: memory: what one rank alone holds"
        " of variables is copied to another one after each step; replicas: nothing is copied, so only what several "
        "ranks hold survives the loss of one; empty = the run ends",
        choices=("", "memory", "replicas"),
    ),
    Key(
        "fault.rebalance",
        "bool",
        True,
        "with fault.elastic: rows are divided anew when ranks are measured to be faster or slower than their shares",
    ),
    Key(
        "fault.join",
        "str",
        "weighed",
        "with fault.elastic: weighed = joining ranks are taken in unless that is known to take longer than what it "
        "saves in the steps that are left; always = at once",
        choices=("weighed", "always"),
    ),
    Key(
        "fault.freeze_s",
        "float",
        3.5,
        "seconds that a rank's process may be stopped, or its host silent, until the run is ended; 0 = for ever",
        minimum=0.0,
    ),
    Key(
        "fault.notice_s",
        "float",
        0.0,
        "seconds from SIGTERM in which the script saves and ends by itself (wh.preempted); 0 = SIGTERM ends it",
        minimum=0.0,
    ),
    Key(
        "fault.stall_s",
        "float",
        60.0,
        "seconds that an operation waits for other ranks before a log line names them; again after twice that time",
        minimum=0.1,
    ),
    Key(
        "fault.give_up_s",
        "float",
        0.0,
        "seconds that an operation waits for other ranks before the run fails; 0 = for ever",
        minimum=0.0,
    ),
    Key(
        "debug.log",
        "str",
        "info",
        "lines of the logger `whale` below this level are left out; debug: also what is compiled, in what time",
        choices=("debug", "info", "warning", "error"),
    ),
    Key(
        "debug.dump",
        "str",
        "",
        "directory that receives the program or plan after every pass as text; programs are verified too; empty = off",
    ),
    Key(
        "debug.trace",
        "str",
        "",
        "file for a trace of this process, its rank in the name; empty = off; one file of all ranks: whale run --trace",
    ),
    Key(
        "debug.check_inputs",
        "int",
        100,
        "what the ranks give to a step, feed a session or read of a dataset is compared between ranks on the first "
        "three calls, and then once in this many calls; what a step captures or a dataset is made of, once; 0 = never",
        minimum=0,
    ),
    Key(
        "debug.check_replicas",
        "int",
        0,
        "the ranks' copies of the variables that a step of wh.function uses are compared once in this many of "
        "its calls; 0 = never",
        minimum=0,
    ),
    Key(
        "debug.check_timeout_s",
        "float",
        60.0,
        "seconds that a rank waits for the others when they compare what is about to run",
        minimum=0.0,
    ),
    Key(
        "debug.emulate_network",
        "str",
        "",
        "delay messages as a slower link would, and have ranks share no memory as on several hosts of so many "
        'ranks: "latency_us=50,bandwidth_MBps=200,hosts=2+2", or some of it; empty = the network as it is',
    ),
)
