// A job by node-cron, on each second that the pattern names; each run writes when it ran. node-cron looks again a second and a little
// after its last look, and so jumps over a second now and then, without Kip too. Then this writes which, and how long after the last look.
const real = setTimeout;
let last = Date.now();
setTimeout = (look, delay) =>
  real(() => {
    const now = Date.now();
    for (let s = Math.floor(last / 1000) + 1; s < Math.floor(now / 1000); s++) console.log(`jumped ${s} ${(now - last) / 1000}`);
    last = now;
    look();
  }, delay);
require("node-cron").schedule(process.argv[2], () => console.log(`ran ${(Date.now() / 1000).toFixed(3)}`));
