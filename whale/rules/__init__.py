"""Layout rules: which placements an op allows over one mesh axis, and what a rank then runs."""

from whale.rules.base import Local, OpView, Rule, Strategy
from whale.rules.empty import known_outputs
from whale.rules.registry import LineRule, all_rules, rule_of

__all__ = ["LineRule", "Local", "OpView", "Rule", "Strategy", "all_rules", "known_outputs", "rule_of"]
