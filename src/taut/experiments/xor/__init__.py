"""Section 4 of the paper: XOR Lagrange, with and without history, and with our solver.

Read in this order: settings (what is open and what we chose), teacher (the XOR network), network
(many students as one), training (the loop), plain (the same loop for one student, without
tricks), runner (chunks of runs over processes), folder (what is saved), figures and summary.
`units` has the other two readings of Lagrange units: trained jointly, and predicted.
"""
