// A job by node-cron, on each second that the pattern names; each run writes when it ran.
require("node-cron").schedule(process.argv[2], () => console.log(`ran ${(Date.now() / 1000).toFixed(3)}`));
