//! Checks the ordinals in a query, such as the 1 in `group by 1`, which names the first column of the answer.
//!
//! polars-sql subtracts 1 from an ordinal before it checks the ordinal, so a 0 panics where overflow is checked, as in
//! a debug build. So a query with a 0 is refused before polars gets it. polars itself refuses all other wrong ordinals.

use super::TableError;
use sqlparser::ast::{
    Expr, GroupByExpr, OrderByKind, Query, Select, Value, ValueWithSpan, Visit, Visitor,
};
use sqlparser::dialect::GenericDialect;
use sqlparser::parser::{Parser, ParserOptions};
use std::ops::ControlFlow;

/// Refuses a query that groups or orders by column 0, in any of its parts. A text that cannot be parsed passes: polars
/// parses it in the same way, and returns the error.
///
/// # Errors
/// [`TableError::OrdinalZero`], with the clause.
pub(super) fn check(sql: &str) -> Result<(), TableError> {
    // The options with which polars parses.
    let options = ParserOptions {
        trailing_commas: true,
        ..ParserOptions::default()
    };
    let parser = Parser::new(&GenericDialect).with_options(options);
    let parsed = parser.try_with_sql(sql);
    let Ok(statements) = parsed.and_then(|mut parser| parser.parse_statements()) else {
        return Ok(());
    };
    match statements.visit(&mut ZeroFinder) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(clause) => Err(TableError::OrdinalZero(clause)),
    }
}

/// Finds a clause with the ordinal 0.
struct ZeroFinder;

impl Visitor for ZeroFinder {
    type Break = &'static str;

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<Self::Break> {
        match query.order_by.as_ref().map(|order| &order.kind) {
            Some(OrderByKind::Expressions(by)) if by.iter().any(|by| is_zero(&by.expr)) => {
                ControlFlow::Break("order by")
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<Self::Break> {
        match &select.group_by {
            GroupByExpr::Expressions(by, _) if by.iter().any(is_zero) => {
                ControlFlow::Break("group by")
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

fn is_zero(expression: &Expr) -> bool {
    match expression {
        Expr::Value(ValueWithSpan {
            value: Value::Number(digits, _),
            ..
        }) => digits.parse() == Ok(0_usize),
        _ => false,
    }
}
