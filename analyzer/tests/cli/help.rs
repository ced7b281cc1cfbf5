//! Tests help, usage errors, completions and the manual, which come from one definition.

use crate::program::run;

#[test]
fn help_states_the_exit_codes() {
    let help = run(&["--help"]);
    assert_eq!(help.code, Some(0));
    insta::assert_snapshot!(help.stdout);
}

#[test]
fn every_command_has_help_and_it_does_not_drift() {
    let help = run(&["--help"]).stdout;
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        // A continued line is indented further.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(commands.contains(&"explain"), "{commands:?}");
    for command in commands {
        let help = run(&[command, "--help"]);
        assert_eq!(help.code, Some(0), "{command}");
        assert!(
            help.stdout.contains("Exit codes:"),
            "{command}: {}",
            help.stdout
        );
        insta::assert_snapshot!(format!("help_of_{command}"), help.stdout);
    }
}

#[test]
fn usage_error_exits_with_2_and_names_the_argument() {
    for (args, rejected) in [
        (&["--no-such-flag"][..], "--no-such-flag"),
        (&["nonsense"][..], "nonsense"),
        (&["completions", "tcl"][..], "tcl"),
        (&["/nowhere/dumps"][..], "/nowhere/dumps: No such file"),
        (&["dumps-of-rank.7"][..], "dumps-of-rank.7: No such file"),
        (
            &["analyze", "--world-size", "0", "x"][..],
            "expected a whole number of at least 1",
        ),
        (
            &["analyze", "--world-size", "4294967296", "x"][..],
            "it is too large",
        ),
        (&["analyze", "--overdue", "5", "x"][..], "write 500ms, 5s"),
    ] {
        let wrong = run(args);
        assert_eq!(wrong.code, Some(2), "{args:?}");
        assert_eq!(wrong.stdout, "", "{args:?}");
        assert!(
            wrong.stderr.contains(rejected),
            "{args:?}: {}",
            wrong.stderr
        );
    }
}

#[test]
fn an_output_in_a_folder_that_does_not_exist_is_an_error_that_states_that() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("missing/report.txt");
    let wrong = run(&[
        "analyze",
        folder.path().to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
    ]);
    assert_eq!(wrong.code, Some(2));
    let reason = "report.txt: its folder does not exist";
    assert!(wrong.stderr.contains(reason), "{}", wrong.stderr);
}

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]);
        assert_eq!(script.code, Some(0), "{shell}");
        assert!(script.stdout.contains("explain"), "{shell}");
    }
}

#[test]
fn manual_is_one_page_or_a_page_for_each_command() {
    let page = run(&["man"]);
    assert_eq!(page.code, Some(0));
    assert!(page.stdout.contains(".TH rcomm-fr 1"), "{}", page.stdout);
    assert!(page.stdout.contains("Exit codes"), "{}", page.stdout);

    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("man1");
    assert_eq!(
        run(&["man", "--out-dir", out.to_str().unwrap()]).code,
        Some(0)
    );
    for page in ["rcomm-fr.1", "rcomm-fr-explain.1"] {
        assert!(out.join(page).is_file(), "{page} is missing");
    }
}

#[test]
fn folder_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let failed = run(&["man", "--out-dir", file.join("man1").to_str().unwrap()]);
    assert_eq!(failed.code, Some(2));
    assert!(
        failed
            .stderr
            .starts_with(&format!("error: cannot write {}", file.display())),
        "{}",
        failed.stderr
    );
}
