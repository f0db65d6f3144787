"""The benchmark harness behind `headwise bench`: ours against peers, in one run, on results that were checked first.

=================  ==================================================================================
`case`             what a benchmark case is: inputs, contenders, work counted, requirements
`suites`           the named suites: shapes, peers and targets, one module per machine class
`inputs`           inputs drawn on the device, in enough sets to exceed its cache
`correctness`      the gate: a case whose result misses its error budget is not timed
`timing`           clocks, and rounds in which all contenders take their turn in shuffled order
`memory`           the most memory a call holds beyond its inputs
`roofs`            how fast the machine copies memory and multiplies matrices
`runner`           checks one case, then measures its memory and time
`report`           results as rows: CSV that reads back, JSON
`plot`             ratios as a picture; `plot_rates` and `plot_roofline`: what a GPU reached
`tuning`           tile sizes of the attention kernels, measured: what `headwise tune` does
=================  ==================================================================================

The protocol is written down in ``bench/README.md``.
"""
