//! Of all swaps that expect the same version of a reference, one wins: between tasks and between
//! processes.

use crate::gateway::Gateway;
use crate::{key, settings};
use kip_store::{Store, SwapError};
use std::process::{Command, Stdio};

const ROUNDS: usize = 20;
const TASKS: usize = 6;
/// Tells a second run of this program which store to race in.
const STORE: &str = "KIP_STORE_RACE_IN";

fn number(value: &[u8]) -> usize {
    std::str::from_utf8(value).unwrap().parse().unwrap()
}

/// Adds one, as often as asked; every number that this task wrote.
async fn count_up(store: Store, rounds: usize) -> Vec<usize> {
    let counter = key("race/counter");
    let mut own = Vec::new();
    while own.len() < rounds {
        let found = store.read_reference(&counter).await.unwrap();
        let (next, version) = found.map_or((1, None), |(value, version)| (number(&value) + 1, Some(version)));
        match store.swap_reference(&counter, version.as_ref(), next.to_string().into()).await {
            Ok(_) => own.push(next),
            Err(SwapError::Conflict { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    own
}

async fn all_tasks(url: &str) -> Vec<usize> {
    let tasks: Vec<_> =
        (0..TASKS).map(|_| tokio::spawn(count_up(Store::open(url, settings()).unwrap(), ROUNDS))).collect();
    let mut numbers = Vec::new();
    for task in tasks {
        numbers.extend(task.await.unwrap());
    }
    numbers
}

/// Two processes of `TASKS` tasks each; `test` is the test that asks, whose second run is the other
/// process.
async fn one_winner_per_version(url: &str, test: &str) {
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(STORE, url)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut numbers = all_tasks(url).await;
    let output = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut other.stdout.take().unwrap(), &mut text).unwrap();
        (other.wait().unwrap(), text)
    });
    let (status, text) = output.await.unwrap();
    assert!(status.success(), "{text}");
    let theirs =
        text.lines().find_map(|line| line.split_once("wrote: ")).expect("the other process says what it wrote").1;
    numbers.extend(theirs.split(' ').map(|word| number(word.as_bytes())));
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=2 * TASKS * ROUNDS).collect::<Vec<_>>(), "each number was written once");
}

/// True in the second run, which is done then.
async fn was_the_other_process() -> bool {
    let Ok(url) = std::env::var(STORE) else { return false };
    let words: Vec<_> = all_tasks(&url).await.iter().map(usize::to_string).collect();
    println!("\nwrote: {}", words.join(" "));
    true
}

// promise stores: one writer wins each version of a reference; an answer that was lost is not
//   guessed, nor is a refusal from a machine between
// held by: this, `crates/store/tests/suite/races.rs::in_a_bucket`,
//   `crates/store/tests/suite/lost_answers.rs::the_own_value_is_recognised`,
//   `crates/store/tests/suite/lost_answers.rs::what_cannot_be_known_is_said`,
//   `crates/store/tests/suite/lost_answers.rs::a_503_after_which_the_condition_fails_may_have_been_a_success`
#[tokio::test(flavor = "multi_thread")]
async fn in_a_directory() {
    if was_the_other_process().await {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    one_winner_per_version(dir.path().to_str().unwrap(), "races::in_a_directory").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_bucket() {
    if was_the_other_process().await {
        return;
    }
    let gateway = Gateway::start().await;
    one_winner_per_version(&gateway.url("race"), "races::in_a_bucket").await;
}

/// Deleting takes lock file and directory away from under the tasks that swap.
#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_reference_of_a_directory_confuses_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap(), settings()).unwrap();
    let head = key("deep/down/head");
    let racers = (0..4).map(|racer: usize| {
        let (store, head) = (store.clone(), head.clone());
        tokio::spawn(async move {
            let mut won = 0;
            let mut round = 0;
            while won < 25 {
                round += 1;
                match store.swap_reference(&head, None, format!("{racer} {round}").into()).await {
                    Ok(version) => {
                        let (value, found) =
                            store.read_reference(&head).await.unwrap().expect("only the winner deletes");
                        assert_eq!((value, found), (format!("{racer} {round}").into(), version));
                        store.delete(&head).await.unwrap();
                        won += 1;
                    }
                    Err(SwapError::Conflict { .. }) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            round
        })
    });
    futures_util::future::try_join_all(racers).await.unwrap();
    assert_eq!(store.read_reference(&head).await.unwrap(), None);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
