"""Lists the configuration keys, each with its type, default, allowed values and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """One known key: its type (as text), default, allowed values and meaning."""

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None

    @property
    def variable(self) -> str:
        """Returns the environment variable that sets this key."""
        return "WHALE_" + self.name.upper().replace(".", "_")


KEYS: tuple[Key, ...] = (
    Key(
        "communication.transport",
        "str",
        "mpi",
        "how ranks exchange data: between processes, or as threads of this one process",
        choices=("mpi", "in-process"),
    ),
    Key(
        "communication.shared_memory",
        "bool",
        True,
        "ranks of one machine exchange data through memory; else, and between machines, through MPI",
    ),
    Key(
        "communication.shared_tensors",
        "bool",
        True,
        "large tensors lie where all ranks of the machine reach them, if wh.init comes before the first one",
    ),
    Key(
        "communication.backend",
        "str",
        "whale",
        "who exchanges tensors: horovod sums gradients; nccl, cuda-ipc, pinned connect GPUs; all else is Whale's own",
        choices=("whale", "horovod", "nccl", "cuda-ipc", "pinned"),
    ),
    Key(
        "communication.group_bytes",
        "int",
        4 << 20,
        "size in bytes up to which small tensors travel together in one all-reduce",
        minimum=0,
    ),
    Key(
        "communication.algorithm",
        "str",
        "auto",
        "how all-reduces are carried out where it can be; auto: what takes least time by size, ranks and link",
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
        "communication.emulate_link",
        "str",
        "",
        'delay messages as a slower link would: "latency_us=50,bandwidth_MBps=200"; empty = off',
    ),
    Key(
        "communication.emulate_hosts",
        "list[int]",
        (),
        "ranks of each of several emulated hosts, which share no memory: 2,2; empty = the hosts as they are",
        minimum=1,
    ),
    Key("cluster.ranks", "int", 1, "number of ranks of the in-process transport", minimum=1),
    Key(
        "replica.shares",
        "list[int]",
        (),
        "rows of the global batch for each rank, or for each coordinate of the axis data; batches of another size in "
        "proportion; empty = as equal as possible",
        minimum=0,
    ),
    Key(
        "mesh",
        "str",
        "",
        "named axes of the ranks and their sizes, outermost first: stage=2,data=2,tensor=2, in code also as a dict; an "
        "axis that the program names and that has no size here gets the ranks that are left; empty = one axis",
    ),
    Key(
        "split.ranks",
        "int",
        0,
        "short for a mesh of data and tensor, which has that size: ranks that shard tensors together; 0 = all ranks",
        minimum=0,
    ),
    Key(
        "auto_parallel",
        "bool",
        False,
        "the first training step is distributed in the way that is predicted to be the fastest; scopes are kept",
    ),
    Key(
        "plan",
        "str",
        "",
        "file that `whale plan -o FILE script` wrote: that script's step runs under it; empty = plans are made",
    ),
    Key(
        "plan_cache",
        "str",
        "auto",
        "folder in which plans, lowered steps and GPU kernels are kept for later runs; auto = whale in XDG_CACHE_HOME "
        "or ~/.cache; empty = they are not kept",
    ),
    Key(
        "annotate",
        "str",
        "",
        "JSON file with scopes by names of layers and variables, as wh.annotate takes them; empty = none",
    ),
    Key(
        "cost_model.profile",
        "str",
        "",
        "file that `whale profile` wrote on this machine, by which auto_parallel predicts; empty: a quick measurement",
    ),
    Key(
        "sync_batch_norm",
        "bool",
        False,
        "normalise batches by the statistics of the whole batch, as one device does; else by those of each rank's rows",
    ),
    Key(
        "random",
        "str",
        "local",
        "local: each rank draws the random rows that it holds; global: every rank draws what one device would",
        choices=("local", "global"),
    ),
    Key(
        "batch.mode",
        "str",
        "global",
        "what each rank passes to a step or feeds: the whole batch, or a local one of its own, in order of ranks",
        choices=("global", "local"),
    ),
    Key(
        "input.prefetch",
        "int",
        2,
        "batches that a wh.shard dataset reads ahead of the step",
        minimum=1,
    ),
    Key(
        "input.threads",
        "int",
        1,
        "threads that run the functions of a wh.shard dataset, unless its options say how many",
        minimum=1,
    ),
    Key("batch.inputs", "list[str]", (), "names of the inputs whose dimension 0 is the batch; empty = found by size"),
    Key(
        "fault.freeze_s",
        "float",
        3.5,
        "seconds that a rank's process may be stopped, or its host silent, until the run is ended; 0 = for ever",
        minimum=0.0,
    ),
    Key(
        "elastic",
        "bool",
        False,
        "ranks go on in their processes when others are killed, frozen or lost",
    ),
    Key(
        "elastic.redundancy",
        "str",
        "memory",
        "with elastic: memory = what one rank alone holds of variables is also on another one, sent after each step; "
        "replicas = only what several ranks hold outlives one of them",
        choices=("memory", "replicas"),
    ),
    Key(
        "elastic.rebalance",
        "bool",
        True,
        "with elastic: rows are divided anew when ranks turn out to be faster or slower than their shares",
    ),
    Key(
        "elastic.join",
        "str",
        "weighed",
        "with elastic: weighed = newcomers are taken in unless that is known to take longer than what it saves in the "
        "steps that are left; always = at once",
        choices=("weighed", "always"),
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
        "seconds that an operation waits for other ranks before a line says for whom; again after twice that time",
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
        "amp.level",
        "str",
        "",
        "O1: matmuls and convolutions of float32 are computed in amp.dtype; empty = as the program says",
        choices=("", "O1"),
    ),
    Key(
        "amp.dtype",
        "str",
        "bfloat16",
        "the type of amp.level=O1; with float16 losses are scaled, and a step whose gradients overflow is skipped",
        choices=("bfloat16", "float16"),
    ),
    Key("amp.initial_scale", "float", 2.0**15, "what losses are multiplied by at first, with float16", minimum=1.0),
    Key(
        "amp.growth_steps",
        "int",
        2000,
        "steps in a row without overflow after which losses are scaled by twice as much, with float16",
        minimum=1,
    ),
    Key(
        "fuse.updates",
        "bool",
        True,
        "on CPUs, optimizers' arithmetic on many variables becomes a few large operations, with the same results",
    ),
    Key(
        "fuse.elementwise",
        "bool",
        True,
        "on CPUs, other arithmetic on elements (normalisations, activations, sums of gradients) becomes operations "
        "that go once over their tensors, with the same results but for the rounding of sums",
    ),
    Key(
        "fuse.convolutions",
        "bool",
        True,
        "on CPUs, small convolutions of single points, and gradients of filters with few points, are computed as "
        "products of matrices, with the same results but for rounding",
    ),
    Key(
        "fuse.products",
        "bool",
        True,
        "on CPUs, a batch of products with one matrix in common is computed as one product, with the same results but "
        "for rounding",
    ),
    Key("fuse.einsums", "bool", True, "batches of small products have a CPU kernel of Whale: equal but for rounding"),
    Key("fuse.padding", "bool", True, "products oneDNN's AVX2 code is slow at are padded: the same but for rounding"),
    Key(
        "fuse.kernels",
        "bool",
        True,
        "on CPUs, losses of numbered classes and gradients of depthwise filters are computed by kernels of Whale, with "
        "the same results but for rounding",
    ),
    Key(
        "gradient_checkpoint.type",
        "str",
        "",
        "activations that are kept for the backward pass, which recomputes the others: collection: those that the "
        "program marks; stage: those that go from stage to stage; auto: some, chosen by bytes; empty = all",
        choices=("", "collection", "auto", "stage"),
    ),
    Key(
        "attention.scores_bytes",
        "int",
        64 << 20,
        "attention with more bytes of scores on a rank is computed in up to 16 blocks of queries, and again for the "
        "backward pass: less memory, more time; 0 = as it is written",
        minimum=0,
    ),
    Key(
        "offload.level",
        "str",
        "",
        "what stays in host memory while an accelerator computes: optimizer: the optimizer's state, and updates "
        "are computed there; v0: weights as well, copied at use; tables: what is looked up by rows alone, with its "
        "state, and only these rows are copied; empty = nothing",
        choices=("", "optimizer", "v0", "tables"),
    ),
    Key(
        "pipeline.num_micro_batch",
        "int",
        1,
        "into how many parts each rank cuts its rows of a batch; gradients are summed over them before the update",
        minimum=1,
    ),
    Key(
        "pipeline.num_stages",
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
        "pipeline.micro_batch_statistics",
        "bool",
        False,
        "normalise batches by the statistics of each micro-batch's rows; otherwise such programs are refused",
    ),
    Key(
        "zero.level",
        "str",
        "0",
        "1 (or v0), 2 (or v1): the optimizer's state is sharded over the ranks; 3: weights too, gathered at use; "
        "0: all of it is replicated",
        choices=("0", "1", "2", "3", "v0", "v1"),
    ),
    Key("zero.ahead", "int", 1, "weights that are gathered while another is used, with zero.level=3", minimum=0),
    Key("zero.min_bytes", "int", 1 << 16, "variables below that size stay whole under zero.level", minimum=0),
    Key(
        "memory.limit_bytes",
        "int",
        0,
        "memory that each rank's device has for a step; one that is predicted to take more is refused; 0 = the host's "
        "memory, or the smallest GPU's, divided by its ranks",
        minimum=0,
    ),
    Key(
        "log.level",
        "str",
        "info",
        "lines of the logger `whale` below this level are left out; debug: also what is compiled, in what time",
        choices=("debug", "info", "warning", "error"),
    ),
    Key(
        "dump",
        "str",
        "",
        "directory that receives the program or plan after every pass as text; programs are verified too; empty = off",
    ),
    Key(
        "trace",
        "str",
        "",
        "file for a trace of this process, its rank in the name; empty = off; one file of all ranks: whale run --trace",
    ),
    Key(
        "check.inputs",
        "int",
        100,
        "what the ranks give to a step, feed a session or read of a dataset is compared on the first three calls, and "
        "then once in so many calls, and what a step captures and a dataset is built of once; 0 = never",
        minimum=0,
    ),
    Key(
        "check.replicas",
        "int",
        0,
        "the ranks' copies of the variables that a step of wh.function uses are compared before every so many of its "
        "calls; 0 = never",
        minimum=0,
    ),
    Key(
        "check.timeout_s",
        "float",
        60.0,
        "seconds that a rank waits for the others when they compare what is about to run",
        minimum=0.0,
    ),
)
