"""The models: those of transformers by their names, and others written out, in the styles that people bring."""
