package format

import "errors"

// ErrInvalidUTF8 reports text that is not UTF-8. It is never repaired: a replacement
// character would be another value.
var ErrInvalidUTF8 = errors.New("the text is not valid UTF-8; correct the value in the database, or set up the connection with client_encoding UTF8")

// ErrFieldCount reports a composite value that has another number of fields than its
// type has in the catalog. The type was altered: the value is older than what the
// Resolver knows, or newer. Looking the type up again helps in the second case.
var ErrFieldCount = errors.New("the value has another number of fields than the type in the catalog, which was altered in between; read the type again, and convert the value by hand if it is older than the change")

// ValueError reports a value that has no JSON. It never holds any part of the value,
// so that it may be logged.
type ValueError struct {
	Type   string // the type's name, by Type.String
	Reason string // what is wrong with the text and what to do
	err    error  // a sentinel above, or nil
}

// Error implements error.
func (e *ValueError) Error() string { return "encode value of type " + e.Type + ": " + e.Reason }

// Unwrap returns ErrInvalidUTF8, ErrFieldCount or nil.
func (e *ValueError) Unwrap() error { return e.err }

// The reasons of a ValueError that has no sentinel. Each says what the text should
// have been, as the text itself must not be shown.
const (
	reasonBool      = "the text is neither t nor f; check that the column has the type that the stream announced"
	reasonInteger   = "the text is not an integer; check that the column has the type that the stream announced"
	reasonFloat     = "the text is not a number; check that the column has the type that the stream announced"
	reasonBytea     = "the text is not in the hex form; set bytea_output to hex for the connection"
	reasonDate      = "the text is not an ISO date; set DateStyle to ISO for the connection"
	reasonTimestamp = "the text is not an ISO timestamp; set DateStyle to ISO for the connection"
	reasonZone      = "the text is not an ISO timestamp in UTC; set TimeZone to UTC and DateStyle to ISO for the connection"
	reasonTime      = "the text is not an ISO time of day; set DateStyle to ISO for the connection"
	reasonInterval  = "the text is not an interval in the style postgres; set IntervalStyle to postgres for the connection"
	reasonNumeric   = "the text is not a number; check that the column has the type that the stream announced"
	reasonScale     = "the number has more digits than its type's scale; check that the type in the catalog is the one that the stream announced"
	reasonMoney     = "the text is not an amount of money with at most two digits behind the point; set lc_monetary to C, or format.types to plain"
	reasonBits      = "the text is not a bit string; check that the column has the type that the stream announced"
	reasonPoint     = "the text is not a point; check that the column has the type that the stream announced"
	reasonJSON      = "the text is empty, which is no JSON; correct the value in the database"
	reasonArray     = "the text is not an array; check that the type in the catalog is the one that the stream announced"
	reasonComposite = "the text is not a row value; check that the type in the catalog is the one that the stream announced"
	reasonHstore    = "the text is not an hstore; check that the type of this name is the hstore extension's"
)

func malformed(t *Type, reason string) error {
	return &ValueError{Type: t.String(), Reason: reason}
}

func invalid(t *Type, err error) error {
	return &ValueError{Type: t.String(), Reason: err.Error(), err: err}
}
