"""One run on several processes ("ranks"), started by ``accelerate launch`` or ``torchrun``.

::

    every rank draws the same tasks --tickets--> each plays its part --exchange--> every rank has the whole round
        --credit, weights, packing of the whole step--> micro-batches dealt to ranks --backward--> one gradient

``ranks``: who there is, and how they talk; ``waves``: who plays which group; ``wire``, ``gathering``: what is said;
``dealing``: who trains which micro-batch; ``meeting``: what all decide together at each step; ``sharded``:
weights that no rank has whole.
"""
