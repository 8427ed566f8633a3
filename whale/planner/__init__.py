"""The planner: finds the fastest distribution of a model over unequal devices. No TensorFlow.

    a cluster file ----------------> Machines (pools: equal devices of equal hosts, their groups)  cost_model.cluster
    description or measured tables -> Model (a chain of layers with seconds and bytes)  cost_model.analytic
    both, batch, limits -----------> search: estimate -> cut -> simulate; exact for few devices        analytic_search
    -> SearchResult -> PlanFile (JSON), which show, draw and the verbs of the command line read        report

`ask.plan` is the entry point; docs/guides/planner.md explains. `cost_model.analytic.evaluate` computes the cost of a
strategy and `analytic_search.plan_check.check` validates it, both without the search. `graph_search` searches
strategies for captured programs.
"""
