//! Procs of a description that are named on a command line, with those that they depend on.

use crate::document::{Described, Document, lettered};
use kip_types::name::ProcName;
use std::path::Path;

/// Leaves those that are named and what they depend on.
///
/// # Errors
/// A line that says which name means none, or several.
pub fn choose(document: &mut Document, names: &[String], path: &Path) -> Result<(), String> {
    if names.is_empty() {
        return Ok(());
    }
    let mut chosen: Vec<_> = names.iter().map(|name| meant(document, name, path)).collect::<Result<_, String>>()?;
    let mut at = 0;
    while let Some(name) = chosen.get(at).cloned() {
        let Some(one) = document.procs.iter().find(|p| p.request.spec.name == name) else {
            return Err(format!("{} describes no proc {name}", path.display()));
        };
        for needed in &one.depends_on {
            if !chosen.contains(needed) {
                chosen.push(needed.clone());
            }
        }
        at += 1;
    }
    document.procs.retain(|p| chosen.contains(&p.request.spec.name));
    Ok(())
}

/// The proc that is meant: by the file's own name for it, by the proc's, by either in other
/// letters, or by a further name that this proc alone has.
fn meant(document: &Document, name: &str, path: &Path) -> Result<ProcName, String> {
    let like = lettered(name);
    let by = |fits: &dyn Fn(&Described) -> bool| -> Vec<&ProcName> {
        document.procs.iter().filter(|one| fits(one)).map(|one| &one.request.spec.name).collect()
    };
    let ways: [&dyn Fn(&Described) -> bool; 5] = [
        &|one| one.called == name,
        &|one| one.request.spec.name.as_str() == name,
        &|one| lettered(&one.called) == like,
        &|one| one.request.spec.name.as_str() == like,
        &|one| one.request.spec.aliases.iter().any(|alias| lettered(alias) == like),
    ];
    match ways.iter().map(|fits| by(*fits)).find(|found| !found.is_empty()).as_deref() {
        Some([one]) => Ok((*one).clone()),
        Some(several) => {
            let several: Vec<_> = several.iter().map(|name| name.as_str()).collect();
            let several = several.join(" and of ");
            Err(format!("{}: {name} is a name of {several}: name the one that is meant", path.display()))
        }
        None => {
            let known = document.procs.iter().flat_map(|one| [one.called.as_str(), one.request.spec.name.as_str()]);
            let meant = kip_types::nearest(name, known).map(|meant| format!(": did you mean {meant}?"));
            Err(format!("{} describes no proc {name}{}", path.display(), meant.unwrap_or_default()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reading;

    #[test]
    fn who_is_named_comes_with_what_it_depends_on() {
        let text = "[proc.a]\ncommand='x'\ndepends-on=['b']\n[proc.b]\ncommand='x'\n[proc.c]\ncommand='x'\n";
        let path = Path::new("/x/kip.toml");
        let reading = Reading { path, text, overrides: &[], lookup: &|_| None, project: None, profiles: &[] };
        let mut document = crate::read(&reading).unwrap();
        assert!(choose(&mut document.clone(), &["d".to_owned()], path).is_err());
        let text = "[proc.webshop]\ncommand='x'\n";
        let one = crate::read(&Reading { text, ..reading }).unwrap();
        let told = meant(&one, "webshp", path).unwrap_err();
        assert_eq!(told, "/x/kip.toml describes no proc webshp: did you mean webshop?");
        choose(&mut document, &["a".to_owned()], path).unwrap();
        let names: Vec<_> = document.procs.iter().map(|p| p.request.spec.name.as_str()).collect();
        assert_eq!(names, ["b", "a"]);
    }

    // promise files: services are named on the command line as the file has them, or by their
    //   proc's name; a further name that two have is refused
    #[test]
    fn services_are_named_as_the_file_names_them() {
        let service = |name: &str, more: &str| format!("  {name}:\n    image: x\n{more}");
        let alias = "    networks: {default: {aliases: [store, my_db]}}\n";
        let text = "services:\n".to_owned()
            + &service("my_service", alias)
            + &service("Web", "    networks: {default: {aliases: [store, db]}}\n    container_name: front\n")
            + &service("db", "    depends_on: [Web]\n");
        let path = Path::new("/x/compose.yaml");
        let reading =
            Reading { path, text: &text, overrides: &[], lookup: &|_| None, project: Some("p"), profiles: &[] };
        let document = crate::read(&reading).unwrap();
        let is = |name: &str| meant(&document, name, path).map(|name| name.to_string());
        for (name, proc) in [
            ("my_service", "p-my-service"),
            ("my-service", "p-my-service"),
            ("p-my-service", "p-my-service"),
            ("p-my_service", "p-my-service"),
            ("Web", "front"),
            ("web", "front"),
            ("front", "front"),
            // One that comes earlier has it as a further name.
            ("db", "p-db"),
            ("my_db", "p-my-service"),
        ] {
            assert_eq!(is(name).as_deref(), Ok(proc), "{name}");
        }
        let two = is("store").unwrap_err();
        assert!(two.contains("store is a name of ") && two.contains("front") && two.contains("p-my-service"), "{two}");
        assert_eq!(is("none").unwrap_err(), "/x/compose.yaml describes no proc none");
    }
}
