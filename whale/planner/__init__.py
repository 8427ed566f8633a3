"""The planner: finds how a model is best spread over unequal devices. No TensorFlow.

    a cluster file ----------------> Machines (pools: equal devices of equal hosts, their groups)  cost_model.cluster
    description or measured tables -> Model (a chain of layers with seconds and bytes)  cost_model.analytic
    both, batch, limits -----------> search: estimate -> cut -> simulate; exact for few devices        analytic_search
    -> SearchResult -> PlanFile (JSON), which show, draw and the command's verbs read                  report

`ask.plan` is the way in; docs/guides/planner.md explains. `cost_model.analytic.evaluate` computes what a strategy costs
and `analytic_search.plan_check.check` whether it is one at all, both without the search. `graph_search` searches ways
to spread captured programs.
"""
