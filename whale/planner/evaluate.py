"""Predicts a step under a strategy through one interface, for described models and for captured programs.

Evaluator          the interface: evaluate(strategy) -> Prediction
ModelEvaluator     for a described or measured model: formulas, and a simulated pipeline schedule
ProgramEvaluator   for a captured program: plans and partitions it, and simulates the ranks' programs

Decision: 0146.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cost_model.analytic.evaluate import evaluate, prediction_of
from cost_model.analytic.layer_costs import Model
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from cost_model.graph.machine_profile import MachineProfile
from whale.ir.prediction import Prediction
from whale.ir.program import Program
from whale.ir.strategy import ParallelStrategy
from whale.partition.lower import make_any_plan
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.plan_prediction import Planned, predict_on
from whale.planner.graph_search.predict import apply, recompute_of


class Evaluator(Protocol):
    """Predicts a step of one model on one cluster, under any strategy."""

    def evaluate(self, strategy: ParallelStrategy) -> Prediction:
        """Predicts step time and memory.

        Raises:
            WhaleError: the strategy cannot run.
        """


@dataclass(frozen=True)
class ModelEvaluator:
    """Evaluates strategies of a described or measured model on a cluster's devices."""

    model: Model
    machines: Machines

    def evaluate(self, strategy: ParallelStrategy) -> Prediction:
        """Predicts step time and memory; raises PlanError if the strategy's schedule is not supported for such
        models.
        """
        return prediction_of(evaluate(self.model, self.machines, strategy), strategy, self.machines, self.model.stack)


@dataclass(frozen=True)
class ProgramEvaluator:
    """Evaluates strategies of a captured program.

    Attributes:
        captured: the program as captured, with its gradients marked, which recomputation needs.
        settings: settings of the compilation; a strategy's recompute and offload override them.
        on: a machine that `whale profile` measured, or a cluster.
    """

    captured: Program
    settings: PlanSettings
    on: MachineProfile | Cluster

    def apply(self, strategy: ParallelStrategy) -> tuple[Program, PlanSettings]:
        """Applies a strategy; returns the normalised program to plan, and the settings to plan it with."""
        settings = self.settings
        if how := recompute_of(strategy):
            settings = settings.but(memory__recompute=how)
        if strategy.offload != "none":
            settings = settings.but(memory__offload=strategy.offload)
        return apply(normalise(self.captured, settings), settings, strategy)

    def plan(self, strategy: ParallelStrategy) -> Planned:
        """Plans the program under a strategy.

        Raises:
            PlanError: the program cannot be distributed that way.
        """
        program, settings = self.apply(strategy)
        return Planned(program, make_any_plan(program, settings), settings)

    def evaluate(self, strategy: ParallelStrategy) -> Prediction:
        """Predicts step time and memory; raises PlanError if the program cannot be distributed that way."""
        return predict_on(self.plan(strategy), self.on)
