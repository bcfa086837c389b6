"""The parts of `bench/hibernate`. Servers' programs are in `bench/programs`; the workspace, the client, percentiles and bars
are those of `parkwake`, the driver of Kip's command line is that of the tests."""
