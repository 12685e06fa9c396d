"""What the training examples share: everything but the definition of the model.

- `settings`: the presets and the command line
- `corpus`: the text, its split by file, packed rows, and the documents in them
- `layers`: rotary positions, and the attention of `jax.nn` to compare with
- `model`: what the training needs to know of a model
- `training`: optimizer, jitted steps, the loop, the whole run
- `checkpoints`: to save and to resume a run
- `generation`: a sample from the trained model
- `curves`: losses as JSON and as a picture
"""
