// A client of the types that openapi-typescript makes: each line that is marked so must not pass the compiler.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

type Tier = components["schemas"]["Tier"];

function must(holds: boolean, what: string): void {
  if (!holds) throw new Error(what);
}

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${token}` } });
const params = { path: { name: "typed" } };

const spec = { name: "typed", command: ["sleep", "1000"] };
const made = await client.POST("/v1/procs", { body: { spec } });
must(made.response.status === 201 && made.data?.state === "running", "it runs");
const procs = await client.GET("/v1/procs");
must(procs.data?.some(proc => proc.name === "typed") === true, "it is listed");
const parked = await client.POST("/v1/procs/{name}/sleep", { params, body: { to: "parked" } });
const tier: Tier | null | undefined = parked.data?.tier;
must(tier === "parked", "it sleeps");
const woken = await client.POST("/v1/procs/{name}/wake", { params });
must(woken.data?.already === false, "it wakes");
const seen = await client.GET("/v1/procs/{name}", { params });
must(seen.data?.last_wake?.from === "parked", "its wake is told");

const taken = await client.POST("/v1/procs", { body: { spec } });
must(taken.error?.code === "taken" && taken.error.message.includes("typed"), "a refusal is read");
// @ts-expect-error a word that is none
must(taken.error?.code !== "nonsense", "a refusal has a code of the list");
// @ts-expect-error a tier that is none
await client.POST("/v1/procs/{name}/sleep", { params, body: { to: "nowhere" } });

const removed = await client.DELETE("/v1/procs/{name}", { params: { ...params, query: { force: true } } });
must(removed.response.status === 204, "it is removed");
const gone = await client.GET("/v1/procs/{name}", { params });
must(gone.error?.code === "unknown", "it is gone");
console.log("passed");
