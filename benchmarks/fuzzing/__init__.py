"""Random hard problems for `taut.project`, and independent checks of every answer it gives.

laws      an activation twice: as taut builds it and as NumPy computes it
matrices  the kinds of A
blocks    a batch of problems, rebuilt from (seed, number) alone
within    the same for inequalities and bounds
checks    what is checked on every row, vectorised
proofs    what is checked on a sample: exact arithmetic, a linear program, a second method
extremes  proofs among the smallest and the largest numbers
optimal   both for inequalities and bounds
gradients against ball arithmetic; tangents: those of inequalities and bounds
bits      neighbours, positions and gradients
tally     counts, tables, JSON
runner    blocks in processes
"""
