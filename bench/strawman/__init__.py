"""The parts of `bench/activeset`. The program is `bench/programs/strawman.c`; the workspace, the client and percentiles are those
of `parkwake`, the driver of Kip's command line is that of the tests."""
