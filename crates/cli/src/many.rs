//! Commands that take the names of several procs: each one is tried, whatever became of those
//! before it.

use crate::names::name;
use crate::output::StdoutGone;
use kip_text::one_line;
use kip_types::name::ProcName;
use std::io::Write;
use std::process::ExitCode;

/// Carries out `one` for each of them. Each failure has a line of its own, and the command then
/// exits with 1.
pub async fn each(names: &[String], one: impl AsyncFn(&ProcName) -> anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    // The one that there is fails as the command.
    if let [only] = names {
        one(&name(only)?).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut code = ExitCode::SUCCESS;
    for text in names {
        let done = match name(text) {
            Ok(name) => one(&name).await,
            Err(e) => Err(e),
        };
        match done {
            Ok(()) => {}
            Err(e) if e.is::<StdoutGone>() => return Err(e),
            Err(e) => {
                let line = failure(text, &e);
                // No reader is left when this fails.
                let _ = writeln!(std::io::stderr(), "kip: {line}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// One line that names the proc.
fn failure(name: &str, error: &anyhow::Error) -> String {
    let line = one_line(&format!("{error:#}"));
    let is_named = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').any(|word| word == name);
    if is_named { line } else { format!("{name}: {line}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use std::cell::RefCell;

    #[tokio::test]
    async fn each_is_tried() {
        let tried = RefCell::new(Vec::new());
        let one = async |name: &ProcName| {
            tried.borrow_mut().push(name.to_string());
            if name.as_str() == "b" { bail!("it cannot") } else { Ok(()) }
        };
        let names = ["a", "b", "No/Name", "c"].map(str::to_owned);
        // An exit code is not to be compared but by its text.
        let code = each(&names, one).await.unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE));
        assert_eq!(*tried.borrow(), ["a", "b", "c"]);
        assert!(each(&["b".to_owned()], one).await.is_err());
        assert_eq!(format!("{:?}", each(&["a".to_owned()], one).await.unwrap()), format!("{:?}", ExitCode::SUCCESS));
    }

    #[test]
    fn each_failure_names_its_proc() {
        assert_eq!(failure("web", &anyhow::anyhow!("web is stopped")), "web is stopped");
        assert_eq!(failure("web", &anyhow::anyhow!("it\ncannot")), "web: it cannot");
        assert_eq!(failure("on", &anyhow::anyhow!("no connection")), "on: no connection");
    }
}
