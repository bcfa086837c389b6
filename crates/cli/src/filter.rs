//! `--filter KEY=VALUE`, of which several may be given: values of one key are alternatives, and
//! every key has to agree. Only labels have to agree all.

use kip_types::nearest;

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFilter {
    key: String,
    value: String,
}

/// The key whose values have to agree all.
const LABEL: &str = "label";

/// Reads one whose key is among `keys`.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str, keys: &[&str]) -> Result<KeyFilter, String> {
    let all = || keys.join(", ");
    let (key, value) = text.split_once('=').ok_or_else(|| format!("write KEY=VALUE, KEY one of {}", all()))?;
    if keys.contains(&key) {
        return Ok(KeyFilter { key: key.to_owned(), value: value.to_owned() });
    }
    Err(match nearest(key, keys.iter().copied()) {
        Some(nearest) => format!("there is no key {key}: did you mean {nearest}?"),
        None => format!("there is no key {key}: known are {}", all()),
    })
}

/// Whether something passes, of which `is` says whether it agrees with a key's value.
pub fn passes(filters: &[KeyFilter], is: impl Fn(&str, &str) -> bool) -> bool {
    filters.iter().all(|filter| {
        let mut same = filters.iter().filter(|other| other.key == filter.key);
        match filter.key.as_str() {
            LABEL => is(LABEL, &filter.value),
            key => same.any(|other| is(key, &other.value)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_alternatives_and_keys_agree() {
        let keys = ["name", "label", "state"];
        let all = |texts: &[&str]| texts.iter().map(|text| parse(text, &keys).unwrap()).collect::<Vec<_>>();
        let is = |key: &str, value: &str| {
            [("name", "web"), ("state", "running"), ("label", "a=1"), ("label", "b")].contains(&(key, value))
        };
        for (filters, passed) in [
            (&[][..], true),
            (&["name=web"], true),
            (&["name=db", "name=web"], true),
            (&["name=web", "state=stopped"], false),
            (&["label=a=1", "label=b"], true),
            (&["label=a=1", "label=c"], false),
        ] {
            assert_eq!(passes(&all(filters), is), passed, "{filters:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_told_with_what_was_meant() {
        assert_eq!(parse("nam=x", &["name", "state"]).unwrap_err(), "there is no key nam: did you mean name?");
        assert!(parse("ancestor=x", &["name", "state"]).unwrap_err().ends_with("known are name, state"));
        assert!(parse("web", &["name"]).unwrap_err().contains("KEY=VALUE"));
    }
}
