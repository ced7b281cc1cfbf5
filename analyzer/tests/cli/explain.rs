//! `rcomm-fr explain`: codes by number and by name, and the list of all.

use crate::program::{finish, rcomm_fr, run, run_with_reader_that_stops};
use rcomm_analyzer::Code;

#[test]
fn all_codes_are_listed_without_an_argument() {
    let listed = run(&["explain"]);
    assert_eq!(listed.code, Some(0));
    for code in Code::ALL {
        let line = listed
            .stdout
            .lines()
            .find(|line| line.starts_with(code.id()))
            .unwrap_or_else(|| panic!("{code} is not listed"));
        assert!(line.contains(code.name()), "{line}");
    }
}

#[test]
fn code_is_found_by_number_and_by_name_in_any_case() {
    let by_number = run(&["explain", "e101"]);
    assert_eq!(by_number.code, Some(0));
    let by_name = run(&["explain", "Not_Joined"]);
    assert_eq!(by_number.stdout, by_name.stdout);
    insta::assert_snapshot!(by_number.stdout);
}

#[test]
fn every_code_has_a_text_with_its_causes_and_what_to_do() {
    for code in Code::ALL {
        let explained = run(&["explain", code.id()]);
        assert_eq!(
            (explained.code, explained.stderr.as_str()),
            (Some(0), ""),
            "{code}"
        );
        let text = explained.stdout;
        let head = format!("{code} {}", code.name());
        assert!(text.starts_with(&head), "{text}");
        let (meaning, rest) = text
            .split_once("Where it usually comes from\n")
            .expect(&text);
        let (causes, actions) = rest.split_once("What to do\n").expect(&text);
        // Below the headline.
        let meaning = meaning
            .lines()
            .skip(1)
            .filter(|line| !line.trim().is_empty());
        assert!(meaning.count() > 0, "{text}");
        for list in [causes, actions] {
            assert!(list.lines().any(|line| line.trim().len() > 2), "{text}");
        }
    }
}

#[test]
fn the_note_on_what_was_left_aside_names_every_kind_of_input() {
    let note = run(&["explain", "N300"]);
    assert_eq!(note.stdout, run(&["explain", "stale_dump"]).stdout);
    let words = note.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for kind in [
        "another job or attempt",
        "an older time",
        "files without records",
        "paths that do not exist",
        "links that lead to nothing",
        "logs and stacks",
        "A record that was taken earlier",
    ] {
        assert!(words.contains(kind), "{kind}: {words}");
    }
}

#[test]
fn several_codes_are_explained_in_the_order_asked() {
    let both = run(&["explain", "W220", "E130"]);
    assert_eq!(both.code, Some(0));
    let position = |text: &str| both.stdout.find(text).expect(text);
    assert!(position("W220 straggler") < position("E130 cross_group_deadlock"));
}

#[test]
fn an_unknown_code_is_refused_in_one_line_with_exit_code_two() {
    let unknown = run(&["explain", "E101", "E999"]);
    assert_eq!(unknown.code, Some(2));
    assert_eq!(unknown.stdout, "");
    assert_eq!(
        unknown.stderr,
        "error: there is no code \"E999\" (hint: `rcomm-fr explain` lists all codes)\n"
    );
}

#[test]
fn colors_are_used_only_where_they_are_wanted() {
    assert!(!run(&["explain", "E101"]).stdout.contains('\u{1b}'));
    let always = run(&["explain", "E101", "--color", "always"]);
    assert!(always.stdout.contains('\u{1b}'));
    let mut never = rcomm_fr(&["explain", "E101", "--color", "never"]);
    never.env("CLICOLOR_FORCE", "1");
    assert!(!finish(never).stdout.contains('\u{1b}'));
    let mut forced = rcomm_fr(&["explain", "E101"]);
    forced.env("CLICOLOR_FORCE", "1");
    assert!(finish(forced).stdout.contains('\u{1b}'));
    let mut no_color = rcomm_fr(&["explain", "E101"]);
    no_color.env("NO_COLOR", "1");
    assert!(!finish(no_color).stdout.contains('\u{1b}'));
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    let args: Vec<&str> = std::iter::once("explain")
        .chain(Code::ALL.iter().map(|code| code.id()))
        .collect();
    assert_eq!(run_with_reader_that_stops(&args), Some(0));
}
