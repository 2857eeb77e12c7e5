"""The options of ``ema=``, one module each."""
