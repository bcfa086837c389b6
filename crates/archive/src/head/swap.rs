//! One change of a head, from the first try to the moment at which it is known whether it stands.
//!
//! Owns what follows when a swap's outcome is not known (`SwapError::Unknown` of the store): the
//! request may still arrive. As long as the head stands that it expects, nothing that is read tells
//! whether it will. So the head is read, and if it is still the one before, the change is swapped
//! again against the same version, as a change of a new number ([`Head::again`]). Of all these
//! tries one can win, for each expects the same version and none comes back; and which one won can
//! be read. Until it is known that one did, or another's did, the caller does not act on the
//! change: it neither wakes the proc nor lets it go.
//!
//! ```text
//! try --done--------------------------> stands
//!  ^ `--unknown--> read --one of ours-> stands
//!  |                | `---another's---> lost: all of ours fail, whenever they arrive
//!  `--next number---+ the one before
//! ```
//!
//! Pure: the caller swaps and reads. A crash in the middle is as if the outcome was never heard:
//! the caller that begins again reads the head, and a change that stood is there with its number.

use super::Head;

/// A change on its way into the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadSwap {
    /// What stood before; none if there was nothing.
    from: Option<Head>,
    /// What was tried, each with a number of its own; the last is being tried.
    tried: Vec<Head>,
}

/// What is known of a change after the head was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It stands, as this head; no try of it can change anything any more.
    Stands(Box<Head>),
    /// It does not stand yet, and may yet do so: swap [`HeadSwap::attempt`], which is another one
    /// now, against the version that was just read, which is the one of before.
    Again,
    /// Another head stands, and no try of this can succeed any more; one may have stood before that
    /// head. The proc is to be looked at anew.
    Lost,
}

impl HeadSwap {
    /// Begins. `from` is what was read, none if the proc has no head; `to` is what follows it.
    pub fn new(from: Option<Head>, to: Head) -> HeadSwap {
        debug_assert!(from.as_ref().is_none_or(|from| from.change < to.change), "what follows has a greater number");
        HeadSwap { from, tried: vec![to] }
    }

    /// What is to be swapped in now, for the version that `from` was read with.
    pub fn attempt(&self) -> &Head {
        self.tried.last().expect("there is always one")
    }

    /// What follows when the swap of [`HeadSwap::attempt`] did not say that it succeeded, and the
    /// head was read after that: `found`, none if there is no head.
    pub fn read(&mut self, found: Option<&Head>) -> Outcome {
        if let Some(ours) = self.tried.iter().find(|tried| Some(*tried) == found) {
            return Outcome::Stands(Box::new(ours.clone()));
        }
        if found != self.from.as_ref() {
            return Outcome::Lost;
        }
        let next = self.attempt().again();
        self.tried.push(next);
        Outcome::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::HeadOwner;
    use crate::ids::{FrontId, OwnerId, ProcId};
    use crate::names::FrontRef;
    use proptest::prelude::*;

    fn first() -> Head {
        Head::first(ProcId([9; 16]), "web".parse().unwrap(), "blue".parse().unwrap(), OwnerId([0; 16]))
    }

    fn advanced(head: &Head, owner: HeadOwner, salt: u8) -> Head {
        let front = FrontRef { generation: head.generation().next(), id: FrontId([salt; 32]) };
        head.advance(owner, front, 2).unwrap()
    }

    /// A reference of the store: a version is never used twice. Requests may arrive much later than
    /// they were sent.
    struct Store {
        version: u64,
        head: Head,
        on_the_way: Vec<(u64, Head)>,
    }

    impl Store {
        fn arrive(&mut self, expected: u64, head: Head) -> bool {
            let is_it = expected == self.version;
            if is_it {
                self.version += 1;
                self.head = head;
            }
            is_it
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// The worker tries; whether the answer comes, whether the request arrives now.
        Try { answered: bool, arrives: bool },
        /// A request that was on its way arrives.
        Late(usize),
        /// Another worker adopts the proc.
        Other,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => any::<(bool, bool)>().prop_map(|(answered, arrives)| Step::Try { answered, arrives }),
            4 => any::<usize>().prop_map(Step::Late),
            1 => Just(Step::Other),
        ]
    }

    proptest! {
        #[test]
        fn what_is_said_to_stand_stands_and_what_is_lost_never_comes(steps in prop::collection::vec(step(), 1..60)) {
            let before = first();
            let mut store = Store { version: 1, head: before.clone(), on_the_way: Vec::new() };
            let mut swap = HeadSwap::new(Some(before.clone()), advanced(&before, before.owner, 1));
            let mut known: Option<Outcome> = None;
            for step in steps {
                match step {
                    Step::Other => {
                        let (version, next) = (store.version, store.head.adopt(OwnerId([1; 16])).unwrap());
                        store.arrive(version, next);
                    }
                    Step::Late(which) if !store.on_the_way.is_empty() => {
                        let which = which % store.on_the_way.len();
                        let (version, head) = store.on_the_way.remove(which);
                        store.arrive(version, head);
                    }
                    Step::Try { answered, arrives } if known.is_none() => {
                        let tried = swap.attempt().clone();
                        // The worker expects the version of `before` as long as it goes on.
                        let done = arrives && store.arrive(1, tried.clone());
                        if !arrives {
                            store.on_the_way.push((1, tried.clone()));
                        }
                        if arrives && answered && done {
                            known = Some(Outcome::Stands(Box::new(tried)));
                        } else {
                            match swap.read(Some(&store.head.clone())) {
                                Outcome::Again => prop_assert!(swap.attempt().change > tried.change),
                                outcome => known = Some(outcome),
                            }
                        }
                    }
                    _ => {}
                }
                let stood = |head: &Head| head.fronts().any(|front| front.id == FrontId([1; 32]));
                match &known {
                    Some(Outcome::Stands(head)) => {
                        prop_assert!(stood(&store.head) && store.head.change >= head.change);
                    }
                    Some(Outcome::Lost) => {
                        prop_assert!(store.head != before);
                        let may_yet = store.on_the_way.iter().any(|(version, _)| *version == store.version);
                        prop_assert!(!may_yet, "none of ours can arrive any more");
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_late_first_try_is_not_mistaken_for_the_second() {
        let before = first();
        let mut swap = HeadSwap::new(Some(before.clone()), advanced(&before, before.owner, 1));
        let tried = swap.attempt().clone();
        assert_eq!(swap.read(Some(&before)), Outcome::Again);
        let second = swap.attempt().clone();
        assert_eq!((second.change, second.current), (tried.change + 1, tried.current));
        assert_eq!(swap.clone().read(Some(&tried)), Outcome::Stands(Box::new(tried)));
        assert_eq!(swap.clone().read(Some(&second)), Outcome::Stands(Box::new(second)));
        // Another advance by the same owner with the same number, with another front.
        assert_eq!(swap.clone().read(Some(&advanced(&before, before.owner, 2))), Outcome::Lost);
        assert_eq!(swap.read(None), Outcome::Lost);
        let mut new = HeadSwap::new(None, before.clone());
        assert_eq!(new.read(None), Outcome::Again);
        assert_eq!(new.read(Some(&before)), Outcome::Stands(Box::new(before)));
    }
}
