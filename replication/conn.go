package replication

import (
	"context"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// DefaultConnectTimeout bounds one attempt to connect where the DSN has no
	// connect_timeout: long enough for a TLS handshake over a bad line, short enough
	// that a host which swallows packets does not look like a hang.
	DefaultConnectTimeout = 15 * time.Second

	// A peer that vanished without a FIN is noticed after idle + interval × count,
	// 25 s: below the server's default wal_sender_timeout of 60 s, so that this side
	// never believes in a connection for longer than the server does.
	keepaliveIdle     = 10 * time.Second
	keepaliveInterval = 5 * time.Second
	keepaliveCount    = 3
)

// sessionSettings are the startup parameters of every connection. They come last in
// PostgreSQL's order of precedence, so they win over ALTER ROLE … SET, ALTER DATABASE
// … SET and the DSN's options=-c …; the text of a value is then the same whatever
// role or database have set. The stream and a snapshot must agree on them, else one
// row would have two spellings.
func sessionSettings() map[string]string {
	return map[string]string{
		"client_encoding":    "UTF8",
		"TimeZone":           "UTC",
		"DateStyle":          "ISO, MDY",
		"IntervalStyle":      "postgres",
		"bytea_output":       "hex",
		"extra_float_digits": "1", // any value above 0: the shortest text that reads back exactly
		// 18 says by a warning that it leaves changes out (NoticeTooYoung).
		"client_min_messages": "warning",
		// The timeouts of a role are made for applications; here they would end the
		// wait for a slot, or the decoding of a large transaction, for ever again.
		"statement_timeout":                   "0",
		"lock_timeout":                        "0",
		"idle_in_transaction_session_timeout": "0",
		"idle_session_timeout":                "0",
	}
}

// ConnOption changes how a connection is made.
type ConnOption func(*pgconn.Config)

// WithDial replaces the dialer, for tests that cut or delay the connection.
func WithDial(dial pgconn.DialFunc) ConnOption {
	return func(c *pgconn.Config) { c.DialFunc = dial }
}

// WithNotice is told the server's notices and warnings.
func WithNotice(f func(*pgconn.Notice)) ConnOption {
	return func(c *pgconn.Config) { c.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { f(n) } }
}

// Conn is an ordinary connection, for those who only hold one and pass it on.
type Conn = pgx.Conn

// Connector opens an ordinary connection, as Connect does.
type Connector func(ctx context.Context, opts ...ConnOption) (*pgx.Conn, error)

// NewConnector gives the Connector of a DSN.
func NewConnector(dsn, appName string, opts ...ConnOption) Connector {
	return func(ctx context.Context, more ...ConnOption) (*pgx.Conn, error) {
		return Connect(ctx, dsn, appName, slices.Concat(opts, more)...)
	}
}

// Connect opens an ordinary connection for work on the catalog: publications, slots,
// primary keys. The DSN's hosts, sslmode, options and target_session_attrs hold.
// search_path is left alone, because event triggers of the database may rely on it;
// all SQL of this package qualifies its names instead.
//
// Errors are classified (ErrAuth and so on, see IsConfiguration) and never contain
// the password. The caller closes the connection.
func Connect(ctx context.Context, dsn, appName string, opts ...ConnOption) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, dsnError(err)
	}
	if err := prepareConfig(&cfg.Config, dsn, appName, opts); err != nil {
		return nil, err
	}
	// Statements are not kept prepared: the queries are rare, and a kept one would
	// fail after DDL with "cached plan must not change result type".
	cfg.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec
	cfg.StatementCacheCapacity, cfg.DescriptionCacheCapacity = 0, 0
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, connectFailure(&cfg.Config, err)
	}
	return conn, nil
}

// WalsenderConfig is the configuration of a walsender connection
// (replication=database), with the same session settings as Connect. Pass it to
// ConnectReplication.
func WalsenderConfig(dsn, appName string, opts ...ConnOption) (*pgconn.Config, error) {
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return nil, dsnError(err)
	}
	if err := prepareConfig(cfg, dsn, appName, opts); err != nil {
		return nil, err
	}
	cfg.RuntimeParams["replication"] = "database"
	cfg.AfterConnect = afterConnectReplication
	return cfg, nil
}

// afterConnectReplication is afterConnect, and asks for the bytes as they are where the
// database has no encoding of its own. To a UTF-8 client its server converts nothing but
// checks each value, and a wrong one ends the stream: nothing behind it would ever
// arrive. Unchecked, it is one change that cannot be encoded, and a dead letter.
func afterConnectReplication(ctx context.Context, conn *pgconn.PgConn) error {
	if err := afterConnect(ctx, conn); err != nil {
		return err
	}
	if conn.ParameterStatus("server_encoding") != "SQL_ASCII" {
		return nil
	}
	_, err := conn.Exec(ctx, "SET client_encoding = 'SQL_ASCII'").ReadAll()
	return err
}

// ConnectReplication opens a walsender connection. Its errors are like those of
// Connect; a role without the REPLICATION right is a *checkpoint.Refusal.
func ConnectReplication(ctx context.Context, cfg *pgconn.Config) (*pgconn.PgConn, error) {
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err == nil {
		return conn, nil
	}
	if noReplicationRight(err) {
		return nil, refuseReplicationRight(cfg.User, err)
	}
	return nil, connectFailure(cfg, err)
}

func prepareConfig(cfg *pgconn.Config, dsn, appName string, opts []ConnOption) error {
	if err := checkDSN(cfg, dsn); err != nil {
		return err
	}
	if cfg.RuntimeParams == nil {
		cfg.RuntimeParams = map[string]string{}
	}
	settings := sessionSettings()
	settings["application_name"] = appName
	// Parameter names are case-insensitive to the server but not to the map: a
	// "timezone" of the DSN beside our "TimeZone" would win or lose by chance.
	for name := range cfg.RuntimeParams {
		for ours := range settings {
			if strings.EqualFold(name, ours) {
				delete(cfg.RuntimeParams, name)
			}
		}
	}
	maps.Copy(cfg.RuntimeParams, settings)
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = DefaultConnectTimeout
	}
	dialer := &net.Dialer{
		Timeout: cfg.ConnectTimeout,
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount,
		},
	}
	cfg.DialFunc = dialer.DialContext
	cfg.AfterConnect = afterConnect
	for _, o := range opts {
		o(cfg)
	}
	return nil
}

// afterConnect makes the settings that older servers do not know, and which would
// therefore end the connection as startup parameters.
func afterConnect(ctx context.Context, conn *pgconn.PgConn) error {
	if majorVersion(conn.ParameterStatus("server_version")) < 17 {
		return nil
	}
	// Decoding runs inside a transaction of the walsender, so that a role's
	// transaction_timeout would cut a large source transaction at the same point
	// after every reconnect.
	_, err := conn.Exec(ctx, "SET transaction_timeout = 0").ReadAll()
	return err
}

// ServerMajor is the server's major version, such as 18.
func ServerMajor(conn *pgconn.PgConn) int {
	return majorVersion(conn.ParameterStatus("server_version"))
}

// majorVersion reads the number before the first dot of server_version, such as
// "15.8 (Debian 15.8-1)" or "18beta1"; 0 when there is none.
func majorVersion(serverVersion string) int {
	end := 0
	for end < len(serverVersion) && serverVersion[end] >= '0' && serverVersion[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(serverVersion[:end])
	if err != nil {
		return 0
	}
	return n
}

var runtimeParamName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.$]*$`)

// checkDSN refuses connection strings that parse, but in which a password that was
// not percent-encoded has spilled into the host, the database or a parameter's name.
// Those are shown in errors, so that the password would be shown too (DESIGN,
// invariant 9).
func checkDSN(cfg *pgconn.Config, dsn string) error {
	hosts := []string{cfg.Host}
	for _, f := range cfg.Fallbacks {
		hosts = append(hosts, f.Host)
	}
	for _, h := range hosts {
		if strings.Contains(h, "@") {
			return fmt.Errorf("%w: %s", ErrDSN, dsnAdvice)
		}
	}
	if rest, ok := cutScheme(dsn); ok {
		before, _, _ := strings.Cut(rest, "?")
		if _, path, ok := strings.Cut(before, "/"); ok && strings.Contains(path, "@") {
			return fmt.Errorf("%w: %s", ErrDSN, dsnAdvice)
		}
	}
	for name := range cfg.RuntimeParams {
		if !runtimeParamName.MatchString(name) {
			return fmt.Errorf("%w: %s", ErrDSN, dsnAdvice)
		}
	}
	return nil
}

func cutScheme(dsn string) (string, bool) {
	if rest, ok := strings.CutPrefix(dsn, "postgres://"); ok {
		return rest, true
	}
	return strings.CutPrefix(dsn, "postgresql://")
}
