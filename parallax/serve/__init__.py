"""Answer requests with a model over HTTP: the Open Inference Protocol v2.

::

    clients ── HTTP (event loop) ── queue ── worker thread ── ServedModel.run(batch)
               tensors.py, app.py   batching.py               model.py

The event loop reads and answers requests. One thread calls the model; while it computes, the queue collects requests,
and those of equal shapes are computed as one batch.
"""
