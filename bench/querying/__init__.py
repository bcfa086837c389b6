"""The parts of `bench/ycsb`: mariadb with a query cache, the ways to make one more instance of it, and YCSB as its load. How results
are shown is known to `report` only."""
