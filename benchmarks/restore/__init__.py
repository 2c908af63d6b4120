"""What a restore costs, beside what others cost and what the store can serve: ``make bench-restore``.

Every saver saves the state once; then all restores take turns, round after round, each in a process of
its own, into a live state of zeros, and what they brought back is compared bit for bit. ``limits`` is what
the store and the disk allow, ``peers`` how others read, ``ours`` and ``simulated`` what ftckpt does;
``plan`` says what is run, ``figures`` what is asked of it. State, places and measures are those of
``benchmarks.save``.
"""
