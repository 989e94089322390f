"""The reference run: text, model presets and the Trainer set-up. Needs the ``train`` extra."""
