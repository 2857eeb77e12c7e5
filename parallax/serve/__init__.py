"""Answer requests with a model over HTTP, by the Open Inference Protocol v2.

::

    clients ── HTTP (event loop) ── queue ── worker threads ── ServedModel.run(batch)
               tensors.py, app.py   batching.py                model.py

The event loop reads and answers requests. Worker threads call the model. While the model computes, the queue collects
requests. Queued requests of equal shapes and types are computed as one batch.
"""
