package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

func (v *validator) topics(c Config) {
	t := c.Topics
	if bad := topicProblem(t.Prefix); bad != "" && c.Name != "" && !v.spoken("name") {
		v.bad("topics.prefix", quoteEmpty(t.Prefix), bad, "write for example "+c.Name)
	}
	for _, f := range []struct {
		path, template string
		names          []string
	}{
		{"topics.table", t.Table, []string{"prefix", "schema", "table"}},
		{"topics.message", t.Message, []string{"prefix"}},
		{"dead-letter.topic", c.DeadLetter.Topic, []string{"prefix"}},
	} {
		if reason, remedy := fixedTemplate(f.template, f.names...); reason != "" {
			v.bad(f.path, quoteEmpty(f.template), reason, remedy)
		} else if topic := strings.ReplaceAll(f.template, "{prefix}", t.Prefix); c.Kafka.CheckpointTopic != "" && topic == c.Kafka.CheckpointTopic {
			v.bad(f.path, f.template, "is the checkpoint topic, which holds only the position", "write another name, such as {prefix}.records")
		} else if f.path != "dead-letter.topic" && topic == strings.ReplaceAll(c.DeadLetter.Topic, "{prefix}", t.Prefix) {
			v.bad(f.path, f.template, "is the topic of the dead letters, and of nothing else", "write another name, such as {prefix}.records")
		}
	}
	if t.ReplicationFactor == 0 {
		v.bad("topics.replication-factor", "0", "a topic has at least one replica", "write -1 for the broker's default, or a number from 1 on")
	}
	for _, k := range slices.Sorted(maps.Keys(t.Config)) {
		if k == "" || badTopicChars(k) != "" {
			v.bad(join("topics.config", k), t.Config[k], "is not the name of a topic setting", "write for example min.insync.replicas")
		}
	}
	if isr, ok := t.Config["min.insync.replicas"]; ok {
		n, err := strconv.Atoi(isr)
		switch path := "topics.config.min.insync.replicas"; {
		case err != nil || n < 1:
			v.bad(path, isr, "is not a number from 1 on", `write for example "2"`)
		case t.ReplicationFactor > 0 && n > t.ReplicationFactor:
			v.bad(path, isr, fmt.Sprintf("is above topics.replication-factor (%d), so that no write could succeed", t.ReplicationFactor), "write at most that number")
		}
	}
	v.distinct("dead-letter.on", c.DeadLetter.On, "kind")
	if c.Format.TOASTMarker == "" {
		v.bad("format.toast-marker", `""`, "is empty, and could not be told from an empty text", "write for example __walrelay_unchanged")
	}
	v.format(c.Format)
}

func (v *validator) kafka(c Config) {
	k := c.Kafka
	for i, b := range k.Brokers {
		if reason := hostPortProblem(b, 1); reason != "" {
			value := b
			if strings.Contains(b, "@") { // perhaps credentials, in the manner of a URL
				value = masked
			}
			v.bad(fmt.Sprintf("kafka.brokers[%d]", i), quoteEmpty(value), reason, "write host:port, such as 127.0.0.1:9092")
		}
	}
	for _, f := range []struct{ key, val string }{{"ca", k.TLS.CA}, {"cert", k.TLS.Cert}, {"key", k.TLS.Key}} {
		if strings.Contains(f.val, "-----BEGIN") {
			v.bad("kafka.tls."+f.key, masked, "is a PEM text", "write the path of the PEM file")
		}
	}
	if (k.TLS.Cert == "") != (k.TLS.Key == "") && !v.spokenIn("kafka.tls") {
		missing, there := "key", "cert"
		if k.TLS.Cert == "" {
			missing, there = there, missing
		}
		v.bad("kafka.tls."+missing, "", "is missing beside kafka.tls."+there, "give both, or neither")
	}
	v.sasl(k.SASL)
	if bad := topicProblem(k.CheckpointTopic); bad != "" && c.Name != "" && !v.spoken("name") {
		v.bad("kafka.checkpoint-topic", quoteEmpty(k.CheckpointTopic), bad, "write for example _walrelay."+c.Name)
	}
}

// sasl checks that the credentials are those of the mechanism. Where one of
// them is wrong already, what is missing may follow from that and waits.
func (v *validator) sasl(s SASL) {
	if v.spokenIn("kafka.sasl") {
		return
	}
	given := []struct {
		key string
		set bool
	}{
		{"username", s.Username != ""}, {"password", !s.Password.IsZero()}, {"token", !s.Token.IsZero()},
		{"access-key", s.AccessKey != ""}, {"secret-key", !s.SecretKey.IsZero()}, {"session-token", !s.SessionToken.IsZero()},
	}
	needs := map[string][]string{
		SASLPlain: {"username", "password"}, SASLSCRAM256: {"username", "password"}, SASLSCRAM512: {"username", "password"},
		SASLOAuthBearer: {"token"}, SASLAWSMSKIAM: {"access-key", "secret-key"},
	}[s.Mechanism]
	var found []Problem
	for _, g := range given {
		path := "kafka.sasl." + g.key
		needed := slices.Contains(needs, g.key)
		optional := g.key == "session-token" && s.Mechanism == SASLAWSMSKIAM
		switch {
		case g.set && s.Mechanism == "":
			v.bad("kafka.sasl.mechanism", "", "is missing beside credentials", "write "+orList(v.table.at("kafka.sasl.mechanism").enum))
			return
		case g.set && !needed && !optional:
			found = append(found, Problem{Path: path, Line: v.at(path).line, Reason: "is not used by " + s.Mechanism, Remedy: "remove it, or choose its mechanism"})
		case !g.set && needed:
			found = append(found, Problem{Path: path, Reason: "is missing; " + s.Mechanism + " needs it", Remedy: "write it, secrets as ${VAR} or ${file:/path}"})
		}
	}
	for _, p := range found {
		v.add(p)
	}
}
