"""Real models in small: each stays equal to eager, has a floor of what is captured, and a plan that reviewers see.

``test_zoo.py`` runs them; ``python -m tests.zoo`` writes ``docs/zoo.md``.
"""
