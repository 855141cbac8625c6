"""How the bundled model, its traces and the prompts were made; steps in docs/demo-model.md.

Needs torch, transformers and tokenizers (`pip install eldr[train]`). Nothing else imports it.
"""
