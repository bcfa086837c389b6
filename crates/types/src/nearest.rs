//! What a word that is not known was probably meant to be.

/// The one of `known` that `word` was probably meant to be, by the letters in which they differ;
/// none if none is near.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// More letters than these are another word.
    const FARTHEST: usize = 3;
    let plain_of = |word: &str| word.replace('_', "-").to_ascii_lowercase();
    let plain = plain_of(word);
    let far = |known: &str| strsim::damerau_levenshtein(&plain, &plain_of(known));
    known
        .map(|known| (far(known), known))
        .filter(|(far, known)| {
            let is_near = *far <= FARTHEST && 2 * far <= known.len().max(plain.len());
            is_near || !plain.is_empty() && plain_of(known).starts_with(&plain)
        })
        .min_by_key(|(far, _)| *far)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found() {
        let known = ["port", "park-after", "env", "env-file"];
        assert_eq!(nearest("ports", known.into_iter()), Some("port"));
        assert_eq!(nearest("park_after", known.into_iter()), Some("park-after"));
        assert_eq!(nearest("ENV", known.into_iter()), Some("env"));
        assert_eq!(nearest("stop_grace_perd", ["stop_grace_period"].into_iter()), Some("stop_grace_period"));
        assert_eq!(nearest("zzzzzzzzzzzz", known.into_iter()), None);
        assert_eq!(nearest("x", std::iter::empty()), None);
        assert_eq!(nearest("none", ["front"].into_iter()), None, "most of its letters are others");
    }
}
