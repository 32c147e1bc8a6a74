"""`anymamba bench`: how fast is each implementation that exists on this machine, side by side?

`subjects` says what is measured and at which sizes, `implementations` who can do it here, `timing` and `memory` how a figure
comes about, `floors` what this machine could do at best, `run` puts them together, `results` is what comes out; `page`,
`plots` and `compare` show it. Every row is compared with the float64 reference before it is timed.
"""
