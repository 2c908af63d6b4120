"""What a save costs, beside what others cost and what the machine allows: ``make bench-save``.

One run measures everything that it compares, in turn, round after round, each in a process of its own.
``state`` is what is saved, ``limits`` what the machine allows, ``peers`` how others save it, ``ours``,
``windows`` and ``leaves`` what ftckpt does; ``plan`` says what is run, ``figures`` what is asked of it.
"""
