"""The parts of `bench/archive`. The workspace, the client, percentiles, tables and figures are those of `parkwake` and `strawman`,
servers' set-ups, the S3 server and the driver of Kip's command line are those of the tests."""
