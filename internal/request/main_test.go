package request

import (
	"os"
	"testing"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }
