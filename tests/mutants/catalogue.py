"""The faults that ``python -m tests.mutants`` plants: what a careful reviewer could miss.

Kinds: what a fault makes wrong.

    sum         what is added up over ranks or micro-batches, or what the sum is divided by
    exchange    who sends what to whom, and whether anybody hears of it
    share       which part of a tensor, batch or file is whose
    order       of the phases of a pipeline, and what may wait between them
    state       something old, or meant for others, is taken for what is wanted now
    prediction  time and memory, and what is chosen by them
    error       a mistake of the user or of the machine that nobody hears of
    end         how a run ends, and what is there afterwards
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: ``old``, which stands once in the file ``path``, is replaced by ``new``.

    Attributes:
      found_by: the quickest tests that find it, as pytest takes them.
    """

    name: str
    path: str
    old: str
    new: str
    kind: str
    found_by: tuple[str, ...]


MUTANTS = (
    Mutant(
        "average_without_rows",  # of the ranks' statistics: as if all ranks had as many rows
        "whale/ir/layout.py",
        "return self.rows[coordinate] / sum(self.rows)",
        "return 1 / len(self.rows)",
        "sum",
        ("tests/runtime/layouts/test_per_rank.py::test_each_rank_normalises_its_own_rows",),
    ),
    Mutant(
        "mean_of_own_rows",  # of a micro-batch or a rank: divided by its rows in place of the batch's
        "whale/sharding_rules/math/reductions.py",
        "        count *= op.inputs[0].shape[i]  # type: ignore[index,operator]\n",
        "        own = strategy.inputs[0].local(coordinate) if i == strategy.inputs[0].dim else op.inputs[0].shape[i]\n"
        "        count *= own or 1  # type: ignore[operator]\n",
        "sum",
        ("tests/sharding_rules/test_rules.py::test_mean_over_a_cut_dimension_is_a_sum",),
    ),
    Mutant(
        "slices_stay_scaled",  # gradients of tables keep the scale of the loss
        "whale/capture/loss_scaling.py",
        "tf.IndexedSlices(_unscale(gradient.values, by), gradient.indices, gradient.dense_shape)",
        "tf.IndexedSlices(gradient.values, gradient.indices, gradient.dense_shape)",
        "sum",
        ("tests/runtime/test_loss_scale.py::test_gradients_of_the_rows_of_a_table_are_those_without_a_scale",),
    ),
    Mutant(
        "metric_by_rows",  # losses of single outputs: averaged over rows where Keras averages over batches
        "whale/frontends/keras/keras3.py",
        "update_state(values, sample_weight=None if isinstance(sample_weight, int) else sample_weight)",
        "update_state(values, sample_weight=sample_weight)",
        "sum",
        ("tests/keras_fit/test_partial_batches.py",),
    ),
    Mutant(
        "sum_counted_on_every_rank",  # what all have becomes a partial sum
        "whale/partition/resharding.py",
        "        return local if e.rank == 0 else e.fill(name, local, t, want.op)\n    if isinstance(have, Shard):",
        "        return local if e.rank == 0 or t.elements == 1 else e.fill(name, local, t, want.op)\n"
        "    if isinstance(have, Shard):",
        "sum",
        ("tests/partition/test_resharding.py::test_every_change",),
    ),
    Mutant(
        "slices_summed_for_average",  # hvd.Average of tf.IndexedSlices
        "whale/frontends/horovod/sums.py",
        "values = divide_by_size(values, context.size) if op is Average else values",
        "values = values",
        "sum",
        ("tests/frontends/horovod/test_sums.py",),
    ),
    Mutant(
        "exchange_in_branch_dropped",  # where this rank reads nothing of the branch
        "whale/partition/spmd.py",
        "if node.op in EXCHANGES or talks(node)]):",
        "if node.op in EXCHANGES]):",
        "exchange",
        ("tests/partition/test_spmd.py::test_a_branch_with_exchanges_inside_runs_to_its_end",),
    ),
    Mutant(
        "sender_of_own_place",  # in stages of unlike meshes the sender has another place than the receiver
        "whale/partition/pipeline/stage_exchanges.py",
        "peer = self.stages.meshes[source].ranks[part.sender]",
        "peer = self.stages.meshes[source].ranks[self.position % len(self.stages.meshes[source].ranks)]",
        "exchange",
        ("tests/runtime/compile/test_messages_of_stages.py",),
    ),
    Mutant(
        "completion_while_posting_lost",  # a step whose messages are all there at once is not gone on with
        "whale_ops/core/operation/schedule_run.cc",
        "    if (lanes_[lane].pending == 0) run_lane(link, static_cast<int>(lane));\n",
        "",
        "exchange",
        ("tests/whale_ops/core/test_core.py::test_calls_under_one_key_meet_in_order",),
    ),
    Mutant(
        "halo_one_short",  # what a rank has of the next one's indices
        "whale/ir/layout.py",
        "min(self.run, first + size + self.halo[1])",
        "min(self.run, first + size + max(0, self.halo[1] - 1))",
        "share",
        ("tests/ir/test_layout.py",),
    ),
    Mutant(
        "shares_by_another_divisor",  # d'Hondt's in place of Sainte-Laguë's: large parts get too much
        "whale/ir/layout.py",
        "Fraction(-weights[i], 2 * sizes[i] + 1)",
        "Fraction(-weights[i], sizes[i] + 1)",
        "share",
        ("tests/ir/test_layout.py",),
    ),
    Mutant(
        "part_of_another_rank",  # of state that lies split over more ranks than it has parts
        "whale/runtime/variables/split_variable.py",
        "return rank % self.tiles.count\n",
        "return rank * self.tiles.count // self._context.size\n",
        "share",
        ("tests/runtime/layouts/test_tiles.py::test_a_step_is_that_of_one_device",),
    ),
    Mutant(
        "part_saved_from_another_place",  # where it begins in the variable, not in what the rank has of it
        "whale/runtime/variables/checkpoint_regions.py",
        "return tf.slice(part, region.start, region.size)",
        "return tf.slice(part, region.begin, region.size)",
        "share",
        ("tests/runtime/variables/test_regions.py",),
    ),
    Mutant(
        "whole_numbers_averaged_in_parts",  # each rank rounds its part of the mean
        "whale/sharding_rules/math/reductions.py",
        '"+" if known and op.outputs[0].dtype in FLOATING else "^"',
        '"+" if known else "^"',
        "share",
        ("tests/sharding_rules/test_rules.py::test_mean_over_a_cut_dimension_is_a_sum",),
    ),
    Mutant(
        "padding_rounded_down",  # of images whose stride does not divide the padding
        "whale_ops/core/compute/depthwise.cc",
        "before > 0 ? (before + stride - 1) / stride : 0",
        "before > 0 ? before / stride : 0",
        "share",
        ("tests/whale_ops/tf_kernels/compute/test_depthwise.py::test_sizes_of_all_kinds",),
    ),
    Mutant(
        "rows_not_divided_again",  # of a batch that was read before the ranks' shares changed
        "whale/runtime/elastic/call_replay.py",
        'value.sizes == rows_of_ranks(rows, context.size, context.config["batch.shares"]):',
        "len(value.sizes) == len(rows_of_ranks(rows, context.size)):",
        "share",
        ("tests/runtime/elastic/test_rows.py",),
    ),
    Mutant(
        "one_forward_too_many",  # before the first backward pass of 1F1B: right, with more memory
        "whale/ir/pipeline_schedule.py",
        "        warm = min(stages - 1 - stage, micro_batches)\n"
        "        row = [Phase(0, m, PhaseKind.F) for m in range(warm)]\n"
        "        for m in range(micro_batches - warm):",
        "        warm = min(stages - stage, micro_batches)\n"
        "        row = [Phase(0, m, PhaseKind.F) for m in range(warm)]\n"
        "        for m in range(micro_batches - warm):",
        "order",
        ("tests/ir/test_schedule.py",),
    ),
    Mutant(
        "credits_of_results_taken_first",  # what is taken at the moment at which another comes
        "whale/ir/pipeline_schedule.py",
        "key=lambda move: (move[0], -move[1])",
        "key=lambda move: (move[0], move[1])",
        "order",
        ("tests/ir/test_schedule.py",),
    ),
    Mutant(
        "plan_of_other_variables",  # a kept plan is found whatever the variables are
        "whale/runtime/compile/plan_cache.py",
        '{_digest(compute_fingerprint(program), program.name, program.variables, settings)}.plan"',
        '{_digest(compute_fingerprint(program), program.name, settings)}.plan"',
        "state",
        ("tests/runtime/compile/test_kept_plans.py::test_a_plan_is_that_of_the_same_variables",),
    ),
    Mutant(
        "stream_repeated_in_time",  # micro-batch 1 of rank 0 draws what micro-batch 0 of rank 1 draws
        "whale/partition/spmd.py",
        "return value * np.array(_TIME_STREAM, value.dtype) if microbatched else value",
        "return value",
        "state",
        ("tests/runtime/layouts/test_per_rank.py::test_micro_batches_draw_from_streams_of_their_own",),
    ),
    Mutant(
        "file_over_environment",  # of the configuration
        "whale/config/reading.py",
        "        path = environment.get(FILE_VARIABLE)\n"
        "        if path:\n"
        '            self._take(_read_keys(path), f"file {path}")\n'
        "        for key, text in _from_environment(environment):\n"
        '            self._set(key, _parse(key, text), f"environment {key.variable}")\n',
        "        for key, text in _from_environment(environment):\n"
        '            self._set(key, _parse(key, text), f"environment {key.variable}")\n'
        "        path = environment.get(FILE_VARIABLE)\n"
        "        if path:\n"
        '            self._take(_read_keys(path), f"file {path}")\n',
        "state",
        ("tests/config/test_reading.py",),
    ),
    Mutant(
        "products_of_the_wrong_size",  # FLOPs of one whose first operand is transposed
        "cost_model/kernels/op_work.py",
        "(shape[-2 if transposed else -1] or 1)",
        "(shape[-1] or 1)",
        "prediction",
        ("tests/cost_model/test_ops.py",),
    ),
    Mutant(
        "slowest_way",  # of those that auto_parallel has predicted
        "whale/planner/graph_search/search.py",
        "best = min(fitting, key=lambda way: way.seconds)",
        "best = max(fitting, key=lambda way: way.seconds)",
        "prediction",
        ("tests/planner/test_best_way.py",),
    ),
    Mutant(
        "memory_of_some_ranks",  # a step is refused only where it fits on no rank
        "whale/runtime/compile/memory_plan.py",
        "if all(one.fits for one in said.values()):",
        "if any(one.fits for one in said.values()):",
        "prediction",
        ("tests/runtime/compile/test_memory_plan.py::test_a_step_that_fits_on_one_rank_only_is_refused",),
    ),
    Mutant(
        "disk_error_dropped",  # of a checkpoint's part
        "whale/runtime/checkpoint/saving.py",
        "            self._error = error\n        self._shares.clear()",
        "            del error\n        self._shares.clear()",
        "error",
        ("tests/runtime/checkpoint/test_checkpoint.py::test_a_full_disk",),
    ),
    Mutant(
        "explained_error_exits_0",  # of the command line
        "whale/cli/__init__.py",
        "    except WhaleError as error:\n"
        '        print(f"whale {options.verb}: {error}", file=sys.stderr)\n'
        "        return 2\n",
        "    except WhaleError as error:\n"
        '        print(f"whale {options.verb}: {error}", file=sys.stderr)\n'
        "        return 0\n",
        "error",
        ("tests/test_cli.py",),
    ),
    Mutant(
        "inputs_compared_once",  # after the first steps never again
        "whale/runtime/input/equal_inputs.py",
        "if calls < FIRST_STEPS or not calls % every:",
        "if calls < FIRST_STEPS and not calls % every:",
        "error",
        ("tests/runtime/input/test_equal_inputs.py",),
    ),
    Mutant(
        "first_failure_blamed",  # also where it only says that another rank is gone
        "whale/launcher/job/ranks.py",
        "return next((failure for failure in failures if not failure.is_consequence), failures[0])",
        "return failures[0]",
        "end",
        ("tests/launcher/test_faults.py::test_the_cause_is_no_rank_that_only_says_that_another_one_is_gone",),
    ),
    Mutant(
        "silence_never_long_enough",  # of a rank that is frozen: each look is the first
        "whale/launcher/job/ranks.py",
        "self._silent_s = min(self._silent_s, now_s)",
        "self._silent_s = now_s",
        "end",
        ("tests/launcher/test_faults.py::test_a_worker_that_waits_for_a_processor_is_not_silent",),
    ),
    Mutant(
        "segments_left",  # of a run that was killed with its launcher
        "whale/launcher/shm_cleanup.py",
        "            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):\n"
        "                shutil.rmtree(folder, ignore_errors=True)",
        "            if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):\n"
        "                shutil.rmtree(folder, ignore_errors=True)",
        "end",
        ("tests/launcher/test_segments.py",),
    ),
)
