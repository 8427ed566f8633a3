"""The intermediate representation (IR): programs, tensor layouts, plans, and their text forms.

Modules here import only each other and ``whale.errors``; they never import TensorFlow or the passes that use them.
"""
