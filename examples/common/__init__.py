"""What the training examples share: everything but the definition of the model.

- `corpus`: the text, its split, packed rows, and where documents begin in them
- `settings`: the presets and the command line
- `layers`: rotary positions, and the attention of `jax.nn` to compare with
- `training`: optimizer, jitted steps, the loop, checkpoints
- `generation`: a sample from the trained model
- `curves`: metrics as JSON, loss curves as PNG
"""
